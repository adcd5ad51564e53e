"""The figures of a training run: bytes by axis, memory, bubble and time, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unisono.division import part_of
from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.parameters.fully_sharded_set import split_dim
from unisono.parallel.run.parameters.optimizers import AVERAGE
from unisono.parallel.run.parameters.parameter_sets import HeldParameter, shard_name
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Layout, state_bytes

_FLOAT32_BYTES = 4
_ADAM_STATES = 2

ByRank = tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedFigures:
    """The figures of a step from closed forms."""

    bytes_sent: Mapping[str, ByRank]
    """Bytes sent in a step, by axis and rank. For `ep`, computed from the last step's routing."""
    memory: Mapping[str, ByRank]
    """Bytes of weights, gradients and optimizer states, by kind and rank."""
    bubble: float
    """Fraction of a step in which a rank of the pipeline waits, if all stages take equal time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """The figures of the last step, equal on all ranks."""

    layout: Layout
    steps: int
    step_s: float
    """Seconds of a step on the slowest rank: the median over the steps after the first."""
    tokens: int
    """Samples times positions of the last step's batch; the samples, if they have no positions."""
    bytes_sent: Mapping[str, ByRank]
    """Bytes sent in the last step, by axis and rank. If two axes have the same ranks, the bytes are
    counted for the first."""
    memory: Mapping[str, ByRank]
    """Bytes of weights, gradients and optimizer states at the end of a step, by kind and rank."""
    exposed_s: ByRank
    """Seconds of the last step's exchanges of gradients, parameters, loss and norm that ran after
    the rank's passes, with its waits for other ranks. Exchanges of activations, and those of
    ZeRO-2 and 3 by torch, are part of the passes."""
    hidden_s: ByRank
    """Seconds of such exchanges that ran while the rank's passes ran."""
    placement: str
    """A line for each axis: whether its groups are within hosts; see `TrainingMesh.explain`."""
    bubble: float
    """Fraction of the time in which a rank waits, averaged over ranks. The time is that of the
    last step from the beginning of the pipeline's first pass to the end of its last pass."""
    predicted: PredictedFigures


def memory_by_kind(model: DividedModel) -> dict[str, int]:
    """Returns the bytes of this rank's weights, gradients and optimizer states.

    The gradients are those that are still in memory at the end of a step.
    """
    values = [held.values for held in model.trained]
    states = [
        state
        for each in model.optimizers.each
        for entry in each.state.values()
        for state in entry.values()
        if isinstance(state, torch.Tensor) and state.dim() > 0
    ]
    gradients = [each.grad for each in values if each.grad is not None]
    return {
        "weights": _storage_bytes([*values, *(held.values for held in model.frozen)]),
        "gradients": _storage_bytes(gradients),
        "optimizer": _storage_bytes(states),
    }


def predicted_memory(model: DividedModel) -> dict[str, float]:
    """Returns the bytes of this rank's weights, gradients and optimizer states, from closed forms.

    Rajbhandari et al., "ZeRO", 2020, table 1. The parameters are those that tensor, pipeline and
    expert parallelism and the placement of embedding tables leave on this rank, and `fully_shard`.
    The bytes are those at the end of a step, when ZeRO-2 keeps no more weights than ZeRO-3.
    """
    # `_elements` counts what ZeRO-2 and 3 leave, so no further division follows
    mesh, every = model.mesh, model.optimizers
    stage = mesh.layout.zero if mesh.layout.zero < 2 else 0
    pairs = [(optimizer, group) for optimizer in every.each for group in optimizer.param_groups]
    states_of = {
        name: states_per_element(optimizer, group)
        + any(AVERAGE in states for states in optimizer.state.values())
        for (optimizer, group), names in zip(pairs, model.groups, strict=True)
        for name in names
    }
    found = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
    for held in model.trained:
        shards = len(mesh.ranks(shard_name(held.block)))
        states = state_bytes(_elements(held, mesh), zero=stage, shards=shards, precision="fp32")
        share = states_of.get(held.name, 0) / _ADAM_STATES
        for kind, count in states._asdict().items():
            kept = share if kind == "optimizer" else 1
            found[kind] += kept * count * held.values.element_size() / _FLOAT32_BYTES
    for held in model.frozen:
        found["weights"] += _elements(held, mesh) * held.values.element_size()
    return found


def _elements(held: HeldParameter, mesh: TrainingMesh) -> int:
    """Returns the number of elements of a parameter that ZeRO-2 and ZeRO-3 leave on this rank."""
    if not isinstance(held.values, DTensor):
        return held.values.numel()
    ranks, dim = mesh.ranks(shard_name(held.block)), split_dim(held.values)
    _, length = part_of(held.values.shape[dim], ranks.index(mesh.rank), len(ranks))
    return held.values.numel() // max(held.values.shape[dim], 1) * length


def states_per_element(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    """Returns an optimizer's number of states for each element of the parameters of a group; that
    of Adam for unknown optimizers.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> for optimizer in (torch.optim.SGD([weight], lr=1), torch.optim.Adagrad([weight])):
    ...     print(states_per_element(optimizer, optimizer.param_groups[0]))
    0
    1
    """
    match optimizer:
        case torch.optim.SGD():
            return int(bool(group["momentum"]))
        case torch.optim.RMSprop():
            return 1 + bool(group["momentum"]) + bool(group["centered"])
        case torch.optim.Adagrad() | torch.optim.ASGD() | torch.optim.Muon():
            return 1
        case torch.optim.Adam():
            return _ADAM_STATES + bool(group["amsgrad"])
    return _ADAM_STATES


def _storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the bytes of the elements on this rank; of a view, only the viewed elements."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in local)


def _bubble(pipeline: Sequence[Mapping[str, Any]]) -> float:
    """Returns the fraction of the time in which a rank does not compute, averaged over ranks."""
    begins, ends = zip(*(each["span"] for each in pipeline), strict=True)  # by the same clock
    makespan, busy_s = max(ends) - min(begins), sum(each["busy_s"] for each in pipeline)
    return 1 - busy_s / len(pipeline) / makespan if makespan > 0 else 0.0


def make_report(layout: Layout, figures: Sequence[Mapping[str, Any]]) -> RunReport:
    """Returns the report from the figures of all ranks, in rank order."""
    pipelines: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    for each in figures:
        pipelines.setdefault(each["pipeline"], []).append(each)
    return RunReport(
        layout=layout,
        steps=figures[0]["steps"],
        step_s=max(median(each["step_s"][1:] or each["step_s"]) for each in figures),
        tokens=figures[0]["tokens"],
        bytes_sent=_by_name([each["bytes_sent"] for each in figures]),
        memory=_by_name([each["memory"] for each in figures]),
        exposed_s=tuple(each["exchanged_s"][0] for each in figures),
        hidden_s=tuple(each["exchanged_s"][1] for each in figures),
        placement=figures[0]["placement"],
        bubble=sum(map(_bubble, pipelines.values())) / len(pipelines),
        predicted=PredictedFigures(
            bytes_sent=_by_name([each["predicted_bytes"] for each in figures]),
            memory=_by_name([each["predicted_memory"] for each in figures]),
            bubble=figures[0]["predicted_bubble"],
        ),
    )


def _by_name(figures: Sequence[Mapping[str, float]]) -> dict[str, ByRank]:
    names = dict.fromkeys(name for each in figures for name in each)
    rows = {name: tuple(each.get(name, 0) for each in figures) for name in names}
    return {name: row for name, row in rows.items() if any(row)}
