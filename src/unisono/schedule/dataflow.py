"""Replay a schedule symbolically: every value that ever exists, what it was made of, and where.

This is where a wrong schedule is refused; what comes out is correct by construction, so that
`lower` need not look again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from unisono.errors import ScheduleError
from unisono.schedule.transfer import Schedule, Transfer

Place = tuple[int, int]
"""(rank, location)"""


@dataclass(slots=True, eq=False, kw_only=True)
class Value:
    """What one location holds between two writes.

    `mask` is the set of contributing ranks as bits, all of them contributions to `chunk`.
    `round` is -1 for what the input holds. `operands` are in the order of the fold; a copy has
    one. `depth` counts nested reductions.
    """

    rank: int
    location: int
    chunk: int
    mask: int
    round: int = -1
    operands: tuple[Value, ...] = ()
    depth: int = 0

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


def trace(schedule: Schedule) -> Dataflow:
    """Replay the schedule; raise `ScheduleError`, naming rank, chunk and round, if it is wrong."""
    if schedule.scratch < 0:
        raise ScheduleError(f"{_name(schedule)}: {schedule.scratch} scratch locations")
    _check_order(schedule)
    state = _initial_state(schedule)
    written: list[Value] = []
    for _, transfers in schedule.rounds():
        values = _replay_round(schedule, state, transfers)
        for value in values:
            state[value.rank, value.location] = value
        written += values
    outputs = dict(_outputs(schedule, state))
    return _keep_live(schedule, written, outputs)


def _check_order(schedule: Schedule) -> None:
    previous = 0
    for t in schedule.transfers:
        if t.round < previous:
            what = f"comes after round {previous}" if t.round >= 0 else "is negative"
            raise ScheduleError(f"{_at(schedule, (t.src, t.src_chunk), t.round)} {what}")
        previous = t.round


def _initial_state(schedule: Schedule) -> dict[Place, Value]:
    collective = schedule.collective
    return {
        (rank, chunk): Value(rank=rank, location=chunk, chunk=chunk, mask=1 << rank)
        for rank in range(collective.ranks)
        for chunk in collective.initial(rank)
    }


def _replay_round(
    schedule: Schedule, state: dict[Place, Value], transfers: tuple[Transfer, ...]
) -> list[Value]:
    incoming: dict[Place, list[tuple[Value, Transfer]]] = {}
    local_reads: list[tuple[Place, int]] = []
    for transfer in transfers:
        _check_range(schedule, transfer)
        for i in range(transfer.count):
            source = (transfer.src, transfer.src_chunk + i)
            target = (transfer.dst, transfer.dst_chunk + i)
            if source not in state:
                raise ScheduleError(
                    f"{_at(schedule, source, transfer.round)} is read before it holds anything"
                )
            incoming.setdefault(target, []).append((state[source], transfer))
            if transfer.src == transfer.dst:
                local_reads.append((source, transfer.round))
    for place, number in local_reads:
        if place in incoming:
            raise ScheduleError(
                f"{_at(schedule, place, number)} is read by its own rank and written "
                "in the same round"
            )
    return [
        _write(schedule, place, state.get(place), sources) for place, sources in incoming.items()
    ]


def _write(
    schedule: Schedule, place: Place, own: Value | None, sources: list[tuple[Value, Transfer]]
) -> Value:
    first = sources[0][1]
    if len(sources) > 1 and not all(t.reduce for _, t in sources):
        writers = ", ".join(str(t.src) for _, t in sources)
        raise ScheduleError(
            f"{_at(schedule, place, first.round)} is written by ranks {writers} at once, "
            "not all reducing"
        )
    operands = [value for value, _ in sources]
    if first.reduce:
        if own is None:
            raise ScheduleError(
                f"{_at(schedule, place, first.round)} is reduced into before it holds anything"
            )
        operands.append(own)
        # The own value goes before other operands of its own rank; the sort is stable.
        operands.sort(key=lambda v: (v.rank, v is not own))
    mask = 0
    for value in operands:
        if value.chunk != operands[0].chunk:
            raise ScheduleError(
                f"{_at(schedule, place, first.round)} mixes contributions to chunk "
                f"{operands[0].chunk} and {value.chunk}"
            )
        if mask & value.mask:
            twice = ", ".join(str(r) for r in _ranks(mask & value.mask))
            raise ScheduleError(
                f"{_at(schedule, place, first.round)} takes the contribution of rank {twice} twice"
            )
        mask |= value.mask
    depth = max(v.depth for v in operands) + (len(operands) > 1)
    return Value(
        rank=place[0],
        location=place[1],
        chunk=operands[0].chunk,
        mask=mask,
        round=first.round,
        operands=tuple(operands),
        depth=depth,
    )


def _check_range(schedule: Schedule, t: Transfer) -> None:
    ranks, locations = schedule.collective.ranks, schedule.num_locations
    if t.count < 1:
        raise ScheduleError(
            f"{_at(schedule, (t.src, t.src_chunk), t.round)}: {t.count} chunks are moved"
        )
    for rank, chunk in ((t.src, t.src_chunk), (t.dst, t.dst_chunk)):
        if not 0 <= rank < ranks:
            raise ScheduleError(
                f"{_at(schedule, (rank, chunk), t.round)}: there are ranks 0..{ranks - 1}"
            )
        if chunk < 0 or chunk + t.count > locations:
            last = chunk + t.count - 1
            raise ScheduleError(
                f"{_at(schedule, (rank, chunk if chunk < 0 else last), t.round)}: "
                f"there are chunks 0..{locations - 1}"
            )


def _outputs(schedule: Schedule, state: dict[Place, Value]) -> Iterator[tuple[Place, Value]]:
    collective = schedule.collective
    want = [sum(1 << r for r in collective.contributors(c)) for c in range(collective.num_chunks)]
    for rank in range(collective.ranks):
        for chunk in collective.wanted(rank):
            value = state.get((rank, chunk))
            if value is None or value.chunk != chunk or value.mask != want[chunk]:
                raise ScheduleError(_wrong_output(schedule, (rank, chunk), value))
            yield (rank, chunk), value


def _wrong_output(schedule: Schedule, place: Place, value: Value | None) -> str:
    where = _at(schedule, place, max(schedule.num_rounds - 1, 0))
    if value is None:
        return f"{where} holds nothing in the end"
    if value.chunk != place[1]:
        return f"{where} holds chunk {value.chunk} in the end"
    missing = sorted(schedule.collective.contributors(place[1]) - set(_ranks(value.mask)))
    return f"{where} lacks the contribution of rank {', '.join(map(str, missing))} in the end"


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


def _ranks(mask: int) -> list[int]:
    return [r for r in range(mask.bit_length()) if mask >> r & 1]


def _name(schedule: Schedule) -> str:
    return f"{schedule.collective.op} by {schedule.algorithm}"


def _at(schedule: Schedule, place: Place, number: int) -> str:
    return f"{_name(schedule)}: rank {place[0]}, chunk {place[1]}, round {number}"
