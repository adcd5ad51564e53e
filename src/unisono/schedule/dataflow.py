"""The values that a right schedule makes, each an object: what it was made of, where, and when.

This is what `lower` works on. The proof that the schedule is right comes first (`proof.py`), so
nothing is looked at twice here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.schedule.proof import prove
from unisono.schedule.schedule import Schedule
from unisono.schedule.transfer import Transfer

Place = tuple[int, int]
"""(rank, location)"""


@dataclass(slots=True, eq=False, kw_only=True)
class Value:
    """What one location holds between two writes.

    `mask` is the set of contributing ranks as bits, all of them contributions to `chunk`.
    `round` is -1 for what the input holds. `operands` are in the order of the fold; a copy has
    one. `depth` counts nested reductions. `in_rank_order` says that the value is the fold of its
    contributions from left to right in the order of their ranks, ((x0 + x1) + x2) + ...: at once,
    or in steps of which each goes on where the one before ended.
    """

    rank: int
    location: int
    chunk: int
    mask: int
    round: int = -1
    operands: tuple[Value, ...] = ()
    depth: int = 0
    in_rank_order: bool = True

    @property
    def reduces(self) -> bool:
        """Whether the value is the result of a reduction."""
        return len(self.operands) > 1


@dataclass(slots=True, kw_only=True)
class Dataflow:
    """The values that matter: those some output is made of.

    `writes[round][rank]` are the values written then and there; `outputs` the final ones.
    """

    schedule: Schedule
    writes: dict[int, dict[int, list[Value]]] = field(default_factory=dict)
    outputs: dict[Place, Value] = field(default_factory=dict)

    @property
    def in_rank_order(self) -> bool:
        """Whether every result is a fold in rank order, or a copy of one; see `Value`."""
        return all(value.in_rank_order for value in self.outputs.values())


def trace(schedule: Schedule) -> Dataflow:
    """Replay the schedule; raise `ScheduleError`, naming rank, chunk and round, if it is wrong."""
    prove(schedule)
    collective = schedule.collective
    state = {
        (rank, chunk): Value(rank=rank, location=chunk, chunk=chunk, mask=1 << rank)
        for rank in range(collective.ranks)
        for chunk in collective.initial(rank)
    }
    written: list[Value] = []
    for number, transfers in schedule.rounds():
        values = _replay_round(state, number, transfers)
        for value in values:
            state[value.rank, value.location] = value
        written += values
    outputs = {
        (rank, chunk): state[rank, chunk]
        for rank in range(collective.ranks)
        for chunk in collective.wanted(rank)
    }
    return _keep_live(schedule, written, outputs)


def folds_in_rank_order(schedule: Schedule) -> bool:
    """Whether every result is one fold of the contributions in the order of ranks, from left to
    right. Of such schedules all give the same bits, element by element, whatever the arithmetic.

    All schedules do for which nothing is reduced. Raises `ScheduleError` when the schedule is
    wrong.

    >>> from unisono import algorithms
    >>> folds_in_rank_order(algorithms.build("all_reduce", "direct", ranks=4))
    True
    >>> folds_in_rank_order(algorithms.build("all_reduce", "ring", ranks=4))
    False
    """
    return trace(schedule).in_rank_order


def _replay_round(
    state: dict[Place, Value], number: int, transfers: Sequence[Transfer]
) -> list[Value]:
    incoming: dict[Place, list[Value]] = {}
    reduced: set[Place] = set()
    for t in transfers:
        for i in range(t.count):
            target = (t.dst, t.dst_chunk + i)
            incoming.setdefault(target, []).append(state[t.src, t.src_chunk + i])
            if t.reduce:
                reduced.add(target)
    return [
        _write(place, number, operands, state[place] if place in reduced else None)
        for place, operands in incoming.items()
    ]


def _write(place: Place, number: int, operands: list[Value], own: Value | None) -> Value:
    if own is not None:
        operands.append(own)
        # The own value goes before other operands of its own rank; the sort is stable.
        operands.sort(key=lambda v: (v.rank, v is not own))
    mask = 0
    for value in operands:
        mask |= value.mask
    return Value(
        rank=place[0],
        location=place[1],
        chunk=operands[0].chunk,
        mask=mask,
        round=number,
        operands=tuple(operands),
        depth=max([v.depth for v in operands]) + (len(operands) > 1),
        in_rank_order=_goes_on(operands),
    )


def _goes_on(operands: list[Value]) -> bool:
    """Whether the first is in rank order, and each other is the one contribution of a rank above
    all before it."""
    first = operands[0]
    last = first.mask
    for value in operands[1:]:
        if value.mask <= last or value.mask & (value.mask - 1):
            return False
        last = value.mask
    return first.in_rank_order


def _keep_live(schedule: Schedule, written: list[Value], outputs: dict[Place, Value]) -> Dataflow:
    live = set(outputs.values())
    writes: dict[int, dict[int, list[Value]]] = {}
    for value in reversed(written):  # operands are always older than what they are made into
        if value in live:
            live.update(value.operands)
            writes.setdefault(value.round, {}).setdefault(value.rank, []).append(value)
    for by_rank in writes.values():
        for values in by_rank.values():
            values.reverse()
    ordered = {number: writes[number] for number in sorted(writes)}
    return Dataflow(schedule=schedule, writes=ordered, outputs=outputs)
