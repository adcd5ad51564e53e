"""Replays a schedule to compute the contents of every rank after every round, for drawings.

The replay uses only the public interface of a schedule. It does not validate the schedule: a wrong
transfer has its effect in the drawing, and `check` reports the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import ScheduleError
from unisono.schedule import Schedule, Transfer

Place = tuple[int, int]
"""(rank, location)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The contents of a location: a chunk, and the ranks that contributed to it. Bit r of `mask` is
    set if rank r has contributed."""

    chunk: int
    mask: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMove:
    """The transfer of one chunk; a transfer of several chunks becomes several moves."""

    src: int
    dst: int
    held: Held
    reduce: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRound:
    """One round: the transfers of single chunks, and the new contents of the written locations."""

    number: int
    moves: tuple[ChunkMove, ...]
    writes: dict[Place, Held]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The contents of the ranks before the first round, and the changes in each round that has
    transfers."""

    start: dict[Place, Held]
    rounds: tuple[ReplayedRound, ...]

    def after(self, count: int) -> dict[Place, Held]:
        """Returns the contents of all ranks after the first `count` rounds that have transfers."""
        state = dict(self.start)
        for replayed in self.rounds[:count]:
            state |= replayed.writes
        return state


def holdings(schedule: Schedule) -> Holdings:
    """Replays a schedule. Raises `ScheduleError` for a transfer with a rank or chunk that does not
    exist.

    >>> from unisono.algorithms import build
    >>> state = holdings(build("all_reduce", "ring", ranks=3)).after(1)
    >>> [state[2, chunk].mask for chunk in range(3)]
    [6, 4, 4]
    """
    collective = schedule.collective
    start = {
        (rank, chunk): Held(chunk=chunk, mask=1 << rank)
        for rank in range(collective.ranks)
        for chunk in collective.initial(rank)
    }
    state = dict(start)
    rounds = []
    for number, transfers in schedule.rounds():
        replayed = _play(schedule, number, transfers, state)
        state |= replayed.writes
        rounds.append(replayed)
    return Holdings(start=start, rounds=tuple(rounds))


def _play(
    schedule: Schedule, number: int, transfers: Sequence[Transfer], state: dict[Place, Held]
) -> ReplayedRound:
    moves = []
    writes: dict[Place, Held] = {}
    for t in transfers:
        _check_range(schedule, t)
        for i in range(t.count):
            held = state.get((t.src, t.src_chunk + i))
            if held is None:
                continue
            place = t.dst, t.dst_chunk + i
            before = writes.get(place, state.get(place)) if t.reduce else None
            mask = before.mask if before is not None and before.chunk == held.chunk else 0
            writes[place] = Held(chunk=held.chunk, mask=mask | held.mask)
            moves.append(ChunkMove(src=t.src, dst=t.dst, held=held, reduce=t.reduce))
    return ReplayedRound(number=number, moves=tuple(moves), writes=writes)


def _check_range(schedule: Schedule, t: Transfer) -> None:
    ranks, locations = schedule.collective.ranks, schedule.num_locations
    for rank, chunk in ((t.src, t.src_chunk), (t.dst, t.dst_chunk)):
        if not (0 <= rank < ranks and chunk >= 0 and chunk + t.count <= locations):
            raise ScheduleError(
                f"round {t.round}: a transfer names rank {rank}, chunks {chunk} to "
                f"{chunk + t.count - 1}, but there are {ranks} ranks and {locations} "
                "chunks"
            )
