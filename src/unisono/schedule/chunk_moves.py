"""Moves of single chunks between numbered places. The proof reads schedules in this form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError, UnsupportedError
from unisono.schedule.collective import Numbers
from unisono.schedule.schedule import Schedule
from unisono.schedule.transfer import Columns

MOST_PLACES = 1 << 28
_MOST_DENSE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NumberedPlaces:
    """Numbers of the places of a schedule. A place is a pair (rank, location).

    Either all places have numbers, or only the places that the schedule uses. The key of a place is
    rank * locations + location. `keys` are the keys in ascending order, or None if the number of
    each place is its key. `initial` and `wanted` are the keys of the places that the collective
    fills and demands.
    """

    schedule: Schedule
    initial: Numbers
    wanted: Numbers
    keys: Numbers | None

    @classmethod
    def of(cls, schedule: Schedule, *used: Numbers) -> NumberedPlaces:
        """Returns the places of a schedule. `used` contains the keys of the places that the moves
        of the schedule use.
        """
        collective, locations = schedule.collective, schedule.num_locations
        ranks = range(collective.ranks)
        initial = _keys((rank * locations, collective.initial(rank)) for rank in ranks)
        wanted = _keys((rank * locations, collective.wanted(rank)) for rank in ranks)
        dense = collective.ranks * locations <= _MOST_DENSE
        keys = None if dense else np.unique(np.concatenate((initial, wanted, *used)))
        return cls(schedule=schedule, initial=initial, wanted=wanted, keys=keys)

    def __len__(self) -> int:
        if self.keys is None:
            return self.schedule.collective.ranks * self.schedule.num_locations
        return len(self.keys)

    def number(self, keys: Numbers) -> Numbers:
        """Returns the numbers of the places with these keys."""
        return keys if self.keys is None else self.keys.searchsorted(keys)

    def ranks(self, places: Numbers) -> Numbers:
        """Returns the ranks of the places with these numbers."""
        keys = places if self.keys is None else self.keys[places]
        return keys // self.schedule.num_locations

    def located(self, places: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the ranks and the locations of the places with these numbers."""
        keys = places if self.keys is None else self.keys[places]
        rank, location = np.divmod(keys, max(1, self.schedule.num_locations))
        return rank, location

    def at(self, place: int, number: int) -> str:
        """Returns the text that describes a place and a round in an error message."""
        key = place if self.keys is None else int(self.keys[place])
        rank, location = divmod(key, self.schedule.num_locations)
        return at(self.schedule, rank, location, number)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """Moves of one chunk each, ordered by round, from place `src` to place `dst`.

    `local` marks moves within a rank. `rounds` lists the number of each round and the slice of its
    moves.
    """

    places: NumberedPlaces
    rounds: tuple[tuple[int, slice], ...]
    src: Numbers
    dst: Numbers
    reduce: NDArray[np.bool_]
    local: NDArray[np.bool_]

    @classmethod
    def of(cls, schedule: Schedule) -> Moves:
        """Returns the moves of a schedule.

        Raises `ScheduleError` for a wrong order of rounds or for ranks, chunks or channels that do
        not exist. Raises `UnsupportedError` for more than `MOST_PLACES` moves.
        """
        columns = schedule.columns
        if schedule.scratch < 0:
            raise ScheduleError(
                f"{name(schedule)}: expected at least 0 scratch locations, got {schedule.scratch}"
            )
        _check_order(schedule, columns)
        _check_ranges(schedule, columns)
        _check_size(schedule, columns)
        locations = schedule.num_locations
        src = columns.src * np.int64(locations) + columns.src_chunk
        dst = columns.dst * np.int64(locations) + columns.dst_chunk
        reduce, local = columns.reduce, columns.src == columns.dst
        edges = tuple(columns.rounds())
        if (columns.count != 1).any():
            count = columns.count.astype(np.int64)
            ends = np.concatenate(([0], count.cumsum()))
            offset = np.arange(ends[-1]) - np.repeat(ends[:-1], count)
            src, dst = np.repeat(src, count) + offset, np.repeat(dst, count) + offset
            reduce, local = np.repeat(reduce, count), np.repeat(local, count)
            edges = tuple((n, slice(int(ends[s.start]), int(ends[s.stop]))) for n, s in edges)
        places = NumberedPlaces.of(schedule, src, dst)
        return cls(
            places=places,
            rounds=edges,
            src=places.number(src),
            dst=places.number(dst),
            reduce=reduce,
            local=local,
        )


def run_starts(numbers: Numbers) -> Numbers:
    """Returns the indices at which runs of equal numbers begin.

    >>> run_starts(np.array([4, 4, 7, 7, 7, 4]))
    array([0, 2, 5])
    """
    new = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=new[1:])
    return new.nonzero()[0]


def name(schedule: Schedule) -> str:
    """Returns the name of the schedule for error messages."""
    return f"{schedule.collective.op} by {schedule.algorithm}"


def at(schedule: Schedule, rank: int, chunk: int, number: int) -> str:
    """Returns the text that describes a rank's chunk and a round in an error message."""
    return f"{name(schedule)}: rank {rank}, chunk {chunk}, round {number}"


def _keys(parts: Iterable[tuple[int, Sequence[int]]]) -> Numbers:
    arrays = [
        np.arange(base + chunks.start, base + chunks.stop)
        if isinstance(chunks, range)
        else base + np.array(chunks, np.int64)
        for base, chunks in parts
    ]
    return np.concatenate(arrays)


def _check_order(schedule: Schedule, columns: Columns) -> None:
    number = columns.round
    wrong = np.flatnonzero(np.diff(number, prepend=np.int32(0)) < 0)
    if len(wrong):
        i = int(wrong[0])
        t = schedule.transfers[i]
        what = "is negative" if t.round < 0 else f"comes after round {number[i - 1]}"
        where = at(schedule, t.src, t.src_chunk, t.round)
        raise ScheduleError(f"{where} {what}")


def _check_ranges(schedule: Schedule, columns: Columns) -> None:
    ranks, locations = schedule.collective.ranks, schedule.num_locations
    count = columns.count.astype(np.int64)
    wrong = (count < 1) | (columns.channel < 0)
    for side, chunks in ((columns.src, columns.src_chunk), (columns.dst, columns.dst_chunk)):
        wrong |= (side < 0) | (side >= ranks) | (chunks < 0) | (chunks + count > locations)
    if not wrong.any():
        return
    t = schedule.transfers[int(np.argmax(wrong))]
    where = at(schedule, t.src, t.src_chunk, t.round)
    if t.count < 1:
        raise ScheduleError(f"{where}: expected a count of at least 1, got {t.count}")
    if t.channel < 0:
        raise ScheduleError(f"{where}: channel {t.channel} is negative")
    for rank, chunk in ((t.src, t.src_chunk), (t.dst, t.dst_chunk)):
        if not 0 <= rank < ranks:
            where = at(schedule, rank, chunk, t.round)
            raise ScheduleError(f"{where}: expected a rank in 0..{ranks - 1}")
        if chunk < 0 or chunk + t.count > locations:
            where = at(schedule, rank, chunk if chunk < 0 else chunk + t.count - 1, t.round)
            raise ScheduleError(f"{where}: expected a chunk in 0..{locations - 1}")


def _check_size(schedule: Schedule, columns: Columns) -> None:
    collective = schedule.collective
    wanted = sum(len(collective.wanted(rank)) for rank in range(collective.ranks))
    most = max(wanted, int(columns.count.sum(dtype=np.int64)))
    if most > MOST_PLACES:
        raise UnsupportedError(
            f"{name(schedule)} on {collective.ranks} ranks moves or demands {most} chunks, "
            f"but `check` accepts at most {MOST_PLACES}"
        )
