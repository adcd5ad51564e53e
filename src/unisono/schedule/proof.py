"""Proof of a schedule, which replays the rounds on all ranks with arrays of chunk numbers and bits.

The proof consists of two replays. The first replay stores for each place the chunk of its
contributions, or -1 for an empty place. This replay finds reads of empty places, mixed chunks, and
conflicting writes. The second replay is for operations that reduce. This replay stores one bit per
place and contributing rank. The second replay finds contributions that are reduced twice or
missing. The second replay handles as many ranks at a time as fit in `_MOST_BYTES`, because the
contributions of different ranks are independent.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError
from unisono.schedule.chunk_moves import Moves
from unisono.schedule.collective import Numbers
from unisono.schedule.schedule import Schedule

_MOST_BYTES = 160 << 20
_BATCH_BYTES = 4 << 20
_WORD_BITS = 64
_NOTHING = -1
_SHOWN = 8


def prove(schedule: Schedule) -> None:
    """Proves that a schedule is correct. Raises `ScheduleError` with the rank, chunk and round
    otherwise.

    A correct schedule meets these conditions:

    - All indices exist, and the rounds are in ascending order.
    - No transfer reads a place before the place has a value.
    - No contribution is reduced twice, or into another chunk.
    - Two transfers of one round write the same place only if all of them reduce.
    - No rank moves a value within its own memory from a place that the same round writes.
    - At the end, every rank holds exactly the chunks that the collective demands.

    Raises `UnsupportedError` for more than `MOST_PLACES` moves.
    """
    prove_moves(Moves.of(schedule))


def prove_moves(moves: Moves) -> None:
    """Proves a schedule that is already cut into moves. See `prove`."""
    collective = moves.places.schedule.collective
    chunks = _Chunks(moves)
    distinct = [chunks.replay(number, where) for number, where in moves.rounds]
    chunks.check_end()
    if not collective.op.reduces:
        return  # each chunk has only one contribution
    words = -(-collective.ranks // _WORD_BITS)
    at_once = max(1, _MOST_BYTES // (8 * max(1, len(moves.places))))
    for first in range(0, words, at_once):
        contributions = _Contributions(moves, first, min(at_once, words - first))
        for (number, where), single in zip(moves.rounds, distinct, strict=True):
            contributions.replay(number, where, distinct=single)
        contributions.check_end()


class _Chunks:
    """Chunk number of the contributions in each place."""

    def __init__(self, moves: Moves) -> None:
        places = moves.places
        self.moves = moves
        self.locations = places.schedule.num_locations
        self.held = np.full(len(places), _NOTHING, np.int64)
        self.held[places.number(places.initial)] = places.initial % max(1, self.locations)
        self._writer = np.zeros(len(places), np.int64)

    def replay(self, number: int, where: slice) -> bool:
        """Replays one round. Returns true if no place is written twice in the round."""
        moves, held, writer = self.moves, self.held, self._writer
        src, dst, reduce = moves.src[where], moves.dst[where], moves.reduce[where]
        moved = held[src]
        if moved.min() < 0:
            self._refuse(src[np.argmin(moved)], number, "is read while empty")
        index = np.arange(len(dst))
        writer[dst] = index  # if several moves write one place, the last is kept
        self._check_local(number, src[moves.local[where]], dst)
        repeated = np.flatnonzero(writer[dst] != index)
        if len(repeated):
            self._check_repeated(number, where, repeated)
        if reduce.any():
            into, added = dst[reduce], moved[reduce]
            own = held[into]
            if own.min() < 0:
                wrong = into[np.argmin(own)]
                self._refuse(wrong, number, "is a reduction's destination while empty")
            mixed = np.flatnonzero(own != added)
            if len(mixed):
                i = mixed[0]
                both = f"mixes contributions to chunk {added[i]} and {own[i]}"
                self._refuse(into[i], number, both)
            if not moves.places.schedule.collective.op.reduces:
                self._refuse(into[0], number, f"takes {self._only_one(int(own[0]))} twice")
            dst, moved = dst[~reduce], moved[~reduce]
        held[dst] = moved
        return len(repeated) == 0

    def check_end(self) -> None:
        """Checks that every output place holds its chunk."""
        places = self.moves.places
        wanted = places.number(places.wanted)
        held = self.held[wanted]
        wrong = np.flatnonzero(held != places.wanted % max(1, self.locations))
        if len(wrong):
            i = wrong[0]
            what = "is empty" if held[i] < 0 else f"holds chunk {held[i]}"
            self._refuse(wanted[i], _last(self.moves), f"{what} at the end")

    def _check_local(self, number: int, read: Numbers, dst: Numbers) -> None:
        last = self._writer[read]  # from an earlier round if this round does not write the place
        written = (last < len(dst)) & (dst[np.minimum(last, len(dst) - 1)] == read)
        if written.any():
            what = "is read by its own rank and written in the same round"
            self._refuse(read[np.argmax(written)], number, what)

    def _check_repeated(self, number: int, where: slice, repeated: Numbers) -> None:
        moves = self.moves
        dst, reduce = moves.dst[where], moves.reduce[where]
        copied = np.concatenate(
            (repeated[~reduce[repeated]], repeated[~reduce[self._writer[dst[repeated]]]])
        )
        if len(copied):
            place = dst[copied.min()]
            sources = moves.places.ranks(moves.src[where][dst == place])
            what = (
                f"is written by ranks {', '.join(map(str, sources))} in one round, "
                "but not all of them reduce"
            )
            self._refuse(place, number, what)

    def _only_one(self, chunk: int) -> str:
        collective = self.moves.places.schedule.collective
        return f"the contribution of rank {min(collective.contributors(0, chunk))}"

    def _refuse(self, place: np.int64, number: int, what: str) -> None:
        raise ScheduleError(f"{self.moves.places.at(int(place), number)} {what}")


class _Contributions:
    """Ranks whose contributions each place holds, as bits in `words` words of 64 bits.

    `bits` has the shape (places, words).
    """

    def __init__(self, moves: Moves, first: int, words: int) -> None:
        places = moves.places
        self.moves = moves
        self.first = first
        self.bits = np.zeros((len(places), words), np.uint64)
        rank = places.initial // max(1, places.schedule.num_locations)
        word = rank // _WORD_BITS - first
        mine = (word >= 0) & (word < words)
        bit = np.uint64(1) << (rank[mine] % _WORD_BITS).astype(np.uint64)
        self.bits[places.number(places.initial[mine]), word[mine]] = bit

    def replay(self, number: int, where: slice, *, distinct: bool) -> None:
        """Replays one round. `distinct` is true if no place is written twice in the round."""
        moves, bits = self.moves, self.bits
        src, dst, reduce = moves.src[where], moves.dst[where], moves.reduce[where]
        if not reduce.any():
            bits[dst] = bits.take(src, axis=0)
        elif distinct:
            bits[dst] = self._add(number, dst, bits.take(src, axis=0), reduce)
        else:
            self._fold(number, src, dst, reduce)

    def check_end(self) -> None:
        """Checks that every output place holds exactly the expected contributions."""
        places = self.moves.places
        collective = places.schedule.collective
        stops = np.array([collective.summands(rank).stop for rank in range(collective.ranks)])
        wanted = places.number(places.wanted)
        batch = max(1, _BATCH_BYTES // self.bits[:1].nbytes)
        for start in range(0, len(wanted), batch):
            some = wanted[start : start + batch]
            want = self._below(stops[places.ranks(some)])
            wrong = (self.bits.take(some, axis=0) != want).any(axis=1)
            if wrong.any():
                i = np.argmax(wrong)
                self._refuse_end(some[i], want[i])

    def _add(
        self, number: int, dst: Numbers, moved: NDArray[np.uint64], reduce: NDArray[np.bool_]
    ) -> NDArray[np.uint64]:
        """Returns the contents of the destinations after these moves. The destinations must
        differ.
        """
        own = self.bits.take(dst, axis=0)
        if not reduce.all():
            own[~reduce] = 0
        self._check_disjoint(number, dst, own, moved)
        return np.bitwise_or(own, moved, out=own)

    def _fold(self, number: int, src: Numbers, dst: Numbers, reduce: NDArray[np.bool_]) -> None:
        """Replays a round in which several moves write the same place. Each pass adds at most one
        operand to each place.
        """
        order = np.argsort(dst, kind="stable")
        ordered = dst[order]
        run_starts = np.flatnonzero(np.diff(ordered, prepend=_NOTHING))
        group = np.repeat(np.arange(len(run_starts)), np.diff(run_starts, append=len(order)))
        position = np.arange(len(order)) - run_starts[group]
        by_position = np.argsort(position, kind="stable")
        stops = np.cumsum(np.bincount(position))
        first = order[run_starts]
        total = self._add(number, dst[first], self.bits.take(src[first], axis=0), reduce[first])
        for start, stop in pairwise(stops):
            at = by_position[start:stop]
            into = group[at]
            own, moved = total[into], self.bits.take(src[order[at]], axis=0)
            self._check_disjoint(number, ordered[at], own, moved)
            total[into] = own | moved
        self.bits[ordered[run_starts]] = total

    def _check_disjoint(
        self, number: int, dst: Numbers, own: NDArray[np.uint64], moved: NDArray[np.uint64]
    ) -> None:
        both = own & moved
        if both.any():
            i = int(np.argmax(both.any(axis=1)))
            where = self.moves.places.at(int(dst[i]), number)
            twice = self._ranks(both[i])
            raise ScheduleError(f"{where} takes the contribution of rank {twice} twice")

    def _refuse_end(self, place: np.int64, want: NDArray[np.uint64]) -> None:
        where = self.moves.places.at(int(place), _last(self.moves))
        has = self.bits[place]
        if (missing := want & ~has).any():
            raise ScheduleError(
                f"{where} lacks the contribution of rank {self._ranks(missing)} at the end"
            )
        more = self._ranks(has & ~want)
        raise ScheduleError(f"{where} has the unexpected contribution of rank {more} at the end")

    def _below(self, stops: Numbers) -> NDArray[np.uint64]:
        """Returns the bits of all ranks below each number in `stops`."""
        starts = _WORD_BITS * (self.first + np.arange(self.bits.shape[1]))
        count = np.clip(stops[:, None] - starts, 0, _WORD_BITS)
        partial = (np.uint64(1) << (count % _WORD_BITS).astype(np.uint64)) - np.uint64(1)
        return np.where(count == _WORD_BITS, ~np.uint64(0), partial)

    def _ranks(self, row: NDArray[np.uint64]) -> str:
        shifts = np.arange(_WORD_BITS, dtype=np.uint64)
        bits = (row[:, None] >> shifts & np.uint64(1)).ravel()
        ranks = (np.flatnonzero(bits) + _WORD_BITS * self.first).tolist()
        more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
        return ", ".join(map(str, ranks[:_SHOWN])) + more


def _last(moves: Moves) -> int:
    return max(moves.places.schedule.num_rounds - 1, 0)
