"""The hyperparameters of the optimizers' groups, such as learning rates, in checkpoints.

A rank of another layout may have other groups, so a checkpoint lists them by parameter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.parallel.run.parameters.optimizers import Optimizers
from unisono.parallel.run.parameters.parameter_sets import HeldParameter
from unisono.parallel.run.rank_agreement import of_all_ranks

Names = Sequence[Sequence[str]]
"""The names of the parameters of each group."""


def group_names(optimizers: Optimizers, trained: Sequence[HeldParameter]) -> list[list[str]]:
    """Returns the names of the parameters of each group, before arrays replace the parameters."""
    names = {held.values: held.name for held in trained}
    return [
        [names[each] for each in group["params"] if each in names] for group in optimizers.groups
    ]


def save_groups(optimizers: Optimizers, names: Names) -> list[dict[str, Any]]:
    """Returns the hyperparameters of all ranks' parameters as values for JSON. Collective.

    Each entry has the names of `parameters` and their `values`. Values that JSON does not have,
    such as functions, are left out.
    """
    own = [
        (json.dumps(_values(group), sort_keys=True), list(parameters))
        for group, parameters in zip(optimizers.groups, names, strict=True)
    ]
    return [
        {"parameters": parameters, "values": json.loads(values)}
        for values, parameters in merged_names(own).items()
    ]


def merged_names(own: Sequence[tuple[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Returns the names that the ranks have under each key, each name once. Collective."""
    merged: dict[str, dict[str, None]] = {}
    for key, names in (each for rank in of_all_ranks(own) for each in rank):
        merged.setdefault(key, {}).update(dict.fromkeys(names))
    return {key: list(names) for key, names in merged.items()}


def fitting_values(
    saved: Sequence[Mapping[str, Any]], names: Names
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Returns the saved values for each group, and the reasons why values do not fit."""
    values_of = {name: each["values"] for each in saved for name in each["parameters"]}
    found: list[Mapping[str, Any]] = []
    problems = []
    for number, parameters in enumerate(names):
        first = next((name for name in parameters if name in values_of), None)
        found.append({} if first is None else values_of[first])
        for name in parameters:
            other = values_of.get(name, found[-1])
            differ = [key for key in found[-1] if other.get(key) != found[-1][key]]
            if differ:
                key = differ[0]
                problems.append(
                    f"group {number} of the optimizer: expected one {key}, got {found[-1][key]} "
                    f"for {first} and {other.get(key)} for {name}"
                )
                break
    return found, problems


def set_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Sets the hyperparameters of a group of an optimizer."""
    for key, value in values.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in group.items():
        plain = _plain(value)
        if key != "params" and (plain is not None or value is None):
            found[key] = plain
    return found


def _plain(value: object) -> Any:
    """Returns a value for JSON; None if JSON does not have the value."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        items = [_plain(each) for each in value]
        return None if None in items else items
    return value if isinstance(value, bool | int | float | str) else None
