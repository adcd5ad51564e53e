"""Builder of schedules, to which algorithms add single transfers or arrays of transfers."""

from __future__ import annotations

from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError
from unisono.schedule.collective import Collective
from unisono.schedule.schedule import Schedule
from unisono.schedule.transfer import FIELDS, Columns, Transfers

Index: TypeAlias = int | NDArray[np.integer[Any]]
"""A number, or an array with one number per transfer."""

_SCALAR_TYPES = (int, bool)
"""Scalar types that `_add` recognises without NumPy, because NumPy's check takes microseconds."""


class Builder:
    """Collects transfers and counts rounds.

    Each argument of `copy` and `reduce` is a number or an integer array. Arrays are broadcast
    together. Each element of the result gives one transfer, in C order.

    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=4, root=0), "tree")
    >>> b.copy(0, 0, 1)
    >>> b.next_round()
    >>> rank = np.arange(2)
    >>> b.copy(rank, 0, rank + 2)
    >>> [(t.round, t.src, t.dst) for t in b.build().transfers]
    [(0, 0, 1), (1, 0, 2), (1, 1, 3)]
    """

    def __init__(self, collective: Collective, algorithm: str, *, scratch: int = 0) -> None:
        self.collective = collective
        self.algorithm = algorithm
        self.scratch = scratch
        self.round = 0
        self._blocks: list[tuple[int, tuple[Any, ...]]] = []  # (number of transfers, fields)
        self._single: list[tuple[int, ...]] = []  # transfers that are not yet in a block

    def copy(
        self,
        src: Index,
        src_chunk: Index,
        dst: Index,
        dst_chunk: Index | None = None,
        *,
        count: Index = 1,
        channel: Index = 0,
    ) -> None:
        """Adds copies to the current round. `dst_chunk` defaults to `src_chunk`.

        Raises `ScheduleError` for arrays that do not contain integers or whose shapes do not fit
        together.
        """
        to = src_chunk if dst_chunk is None else dst_chunk
        self._add(self.round, src, src_chunk, dst, to, count, False, channel)

    def reduce(
        self,
        src: Index,
        src_chunk: Index,
        dst: Index,
        dst_chunk: Index | None = None,
        *,
        count: Index = 1,
        channel: Index = 0,
    ) -> None:
        """Adds reductions into the destinations, in the current round. See `copy`."""
        to = src_chunk if dst_chunk is None else dst_chunk
        self._add(self.round, src, src_chunk, dst, to, count, True, channel)

    def extend(self, columns: Columns) -> None:
        """Adds transfers of any rounds. The current round does not change."""
        self._end_single()
        self._blocks.append((len(columns), columns.arrays()))

    def next_round(self) -> None:
        """Begins the next round, whose transfers read the results of all earlier rounds."""
        self.round += 1

    def build(self) -> Schedule:
        """Returns the schedule. Transfers are ordered by round, and within a round in the order of
        their addition.

        Raises `ScheduleError` for numbers beyond 32 bits.
        """
        self._end_single()
        table = np.empty((len(FIELDS), sum(size for size, _ in self._blocks)), np.int64)
        stop = 0
        for size, block in self._blocks:
            start, stop = stop, stop + size
            for column, values in zip(table, block, strict=True):
                column[start:stop] = values
        if (np.diff(table[0]) < 0).any():
            table = table[:, np.argsort(table[0], kind="stable")]
        return Schedule(
            collective=self.collective,
            algorithm=self.algorithm,
            transfers=Transfers(Columns.of(*table)),
            scratch=self.scratch,
        )

    def _add(self, *row: Any) -> None:
        if all(type(value) in _SCALAR_TYPES for value in row):
            self._single.append(row)
            return
        try:
            shape = np.broadcast_shapes(*{np.shape(value) for value in row})
        except ValueError as e:
            raise ScheduleError(f"round {self.round}: {e}") from None
        for name, value in zip(FIELDS, row, strict=True):
            if type(value) not in _SCALAR_TYPES and np.asarray(value).dtype.kind not in "iub":
                raise ScheduleError(f"round {self.round}, {name}: expected integers, got {value!r}")
        block = tuple(_flat(value, shape) for value in row)
        self._end_single()
        self._blocks.append((prod(shape), block))

    def _end_single(self) -> None:
        if not self._single:
            return
        try:
            table = np.array(self._single, np.int64)
        except OverflowError:
            raise ScheduleError(
                f"round {self.round}: expected numbers of at most 32 bits"
            ) from None
        self._blocks.append((len(self._single), tuple(table.T)))
        self._single = []


def _flat(value: Any, shape: tuple[int, ...]) -> Any:
    """Returns a flat copy, because the caller may change the array later."""
    if type(value) in _SCALAR_TYPES or np.ndim(value) == 0:
        return int(value)
    return np.array(value if len(shape) == 1 else np.broadcast_to(value, shape).ravel())
