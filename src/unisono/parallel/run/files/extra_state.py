"""Values of a program that a checkpoint holds besides the run: plain values, tensors, and objects
with a state, such as schedulers and data loaders.

A value that is equal on all ranks is saved once. A value that is equal on the ranks that share
samples is saved for each data-parallel rank, any other one for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from unisono.parallel.checkpoint import (
    BlockCheckpoint,
    StoredValue,
    raise_first,
    raise_on_all,
    restored,
)
from unisono.parallel.run.batch.batch_parts import data_parallel_rank
from unisono.parallel.training_mesh import TrainingMesh

_KEY = "values"
"""The key of the facts about these values among a checkpoint's values for JSON."""

By = Literal["all", "dp", "rank"]


class ExtraValues(NamedTuple):
    """The values of a program that this rank writes, and facts that are equal on all ranks."""

    values: Mapping[str, bytes]
    facts: Mapping[str, Any]
    """For JSON."""


class _Found(NamedTuple):
    """Facts about the values of a rank, which all ranks know."""

    problem: str
    dp_rank: int
    digests: Mapping[str, str | None]
    """None for a value that is None."""
    parts: set[str]
    """The names of values with parts of tensors."""


class ExtraState:
    """Saves and loads the values of a program with the checkpoints of a run."""

    def __init__(self, mesh: TrainingMesh) -> None:
        self._mesh = mesh

    def collect(self, extra: Mapping[str, Any], problem: str = "") -> ExtraValues:
        """Returns copies of the values and states of a program. Collective.

        Raises `ValueError` on all ranks if a rank has a value that no checkpoint holds, or another
        `problem`.
        """
        own: dict[str, StoredValue] = {}
        problem = problem or _attempt(lambda: own.update(_stored(extra)))
        digests = {n: None if extra[n] is None else each.digest for n, each in own.items()}
        parts = {name for name, each in own.items() if each.is_part}
        facts = _Found(problem, data_parallel_rank(self._mesh), digests, parts)
        found: list[_Found] = self._mesh.of_all_ranks(facts)
        raise_first([each.problem for each in found])
        by = {name: _by(name, found) for name in dict.fromkeys(n for f in found for n in f.digests)}
        kept = {
            name: each
            for name, each in own.items()
            if extra[name] is not None or all(not rank.digests.get(name) for rank in found)
        }
        layout = self._mesh.layout
        return ExtraValues(
            values={self._key(name, by[name]): each.data for name, each in kept.items()},
            facts={_KEY: by, "layout": layout.text(), "dp": layout.dp},
        )

    def load(self, checkpoint: BlockCheckpoint, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a checkpoint, after it has put them into the objects and tensors of
        `extra`. Collective.

        Raises `ValueError` on all ranks if a value does not fit, and if an object of a rank does
        not take its state.
        """
        by: dict[str, By] = checkpoint.extra.get(_KEY, {})
        problem = _attempt(lambda: _require_names(extra))
        wanted = [name for name in by if problem or extra.get(name, 0) is not None]
        checkpoint.require([problem] if problem else self._problems(checkpoint, by, wanted, extra))
        keys = {name: self._key(name, by[name]) for name in wanted}
        stored = {name: key for name, key in keys.items() if key in checkpoint.value_names}
        saved = checkpoint.values(list(stored.values()))
        found: dict[str, Any] = {}

        def put() -> None:
            for name, key in stored.items():
                found[name] = _put(name, saved[key], extra.get(name), by[name])

        raise_on_all(_attempt(put), self._mesh.all_ranks)
        return found

    def _key(self, name: str, by: By) -> str:
        """Returns the name in a checkpoint of a value of this rank."""
        mesh = self._mesh
        whose = {"all": "", "dp": f" dp {data_parallel_rank(mesh)}", "rank": f" rank {mesh.rank}"}
        return f"(extra{whose[by]}).{name}"

    def _problems(
        self,
        checkpoint: BlockCheckpoint,
        by: Mapping[str, By],
        wanted: list[str],
        extra: Mapping[str, Any],
    ) -> list[str]:
        """Returns what a program wants of a checkpoint that this rank cannot load."""
        layout, saved = self._mesh.layout, checkpoint.extra
        known = ", ".join(map(repr, by)) or "none"
        problems = [
            f"extra: expected one of the values of the checkpoint ({known}), got {name!r}"
            for name, each in extra.items()
            if each is not None and name not in by
        ]
        for name in wanted:
            leave = f"or leave it out: load(folder, extra={{{name!r}: None}})"
            if by[name] == "dp" and saved["dp"] != layout.dp:
                problems.append(
                    f"extra[{name!r}]: has a state for each of {saved['dp']} data-parallel ranks, "
                    f"but {layout.text()} has {layout.dp}; load it with dp={saved['dp']}, {leave}"
                )
            if by[name] == "rank" and saved["layout"] != layout.text():
                problems.append(
                    f"extra[{name!r}]: has a state for each rank of {saved['layout']}, which ranks "
                    f"of {layout.text()} do not have; load it in the same layout, {leave}"
                )
        return problems


def _by(name: str, ranks: list[_Found]) -> By:
    """Returns for whom a value is saved."""
    digests = {each.digests.get(name) for each in ranks} - {None}
    if any(name in each.parts for each in ranks):
        return "rank"
    if len(digests) <= 1:
        return "all"
    of_dp: dict[int, set[str]] = {each.dp_rank: set() for each in ranks}
    for each in ranks:
        digest = each.digests.get(name)
        of_dp[each.dp_rank] |= set() if digest is None else {digest}
    return "dp" if all(len(each) == 1 for each in of_dp.values()) else "rank"


def _require_names(extra: object) -> None:
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise ValueError(f"extra: expected a dictionary of values by name, got {extra!r}")


def _stored(extra: Mapping[str, Any]) -> dict[str, StoredValue]:
    _require_names(extra)
    return {
        name: StoredValue.of(each.state_dict() if _has_state(each) else each, f"extra[{name!r}]")
        for name, each in extra.items()
    }


def _has_state(value: object) -> bool:
    """Returns True if a value has a state that it can load."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def _put(name: str, saved: Any, given: Any, by: By) -> Any:
    """Puts a saved value into what the program gave; returns what has the value now."""
    where = f"extra[{name!r}]"
    if _has_state(given):
        # only values by rank have parts of tensors; the state of a loader may start its workers
        like = given.state_dict() if by == "rank" else None
        given.load_state_dict(restored(saved, like, where))
        return given
    value = restored(saved, given, where)
    if not isinstance(given, torch.Tensor):
        return value
    if not isinstance(value, torch.Tensor) or value.shape != given.shape:
        kind = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{where}: expected a tensor {tuple(given.shape)}, got {kind}")
    with torch.no_grad():
        return given.copy_(value)


def _attempt(action: Callable[[], None]) -> str:
    """Returns the error of a rank as text, so that the other ranks do not wait for it."""
    try:
        action()
    except ValueError as error:
        return str(error) or "ValueError"
    except Exception as error:  # of the program's objects
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""
