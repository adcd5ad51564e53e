"""Arrays as rows of their leading axis: counting them, cutting them, finding a place for them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono.communicator.arrays import Array, dtype_of, empty
from unisono.communicator.engine import Later
from unisono.types import DType

ANY = -1
"""A number of rows that is the other side's to say."""

Counts: TypeAlias = Sequence[int]
"""Rows of each rank: a list, or an array of integers."""

Table: TypeAlias = NDArray[np.int64]
"""Rows from each rank (first axis) to each (second axis)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """An array as rows of its leading axis: how many, the shape and the bytes of one."""

    count: int
    shape: tuple[int, ...]
    nbytes: int
    dtype: DType


def rows(array: Array, what: str) -> Rows:
    """The rows of an array. Raises `TypeError`, `ValueError` or `UnsupportedError`.

    >>> rows(np.zeros((3, 4), np.float32), "x")
    Rows(count=3, shape=(4,), nbytes=16, dtype=<DType.FLOAT32: 0>)
    """
    dtype = dtype_of(array)
    if not len(array.shape):
        raise ValueError(f"{what} has no leading axis, so no rows")
    shape = tuple(array.shape[1:])
    nbytes = math.prod(shape) * dtype.size_bytes
    return Rows(count=array.shape[0], shape=shape, nbytes=nbytes, dtype=dtype)


def split(array: Array, counts: Sequence[int]) -> list[Array]:
    """Views of consecutive rows, so many each.

    >>> [piece.tolist() for piece in split(np.arange(4), [1, 0, 3])]
    [[0], [], [1, 2, 3]]
    """
    ends = list(itertools.accumulate(counts))
    return [array[end - count : end] for count, end in zip(counts, ends, strict=True)]


class Place(NamedTuple):
    """Where rows go that come from all ranks, as the caller said it."""

    out: Array | Sequence[Array] | None
    pieces: bool

    @property
    def _listed(self) -> bool:
        return isinstance(self.out, (list, tuple))

    def takes(self, have: Rows, ranks: int) -> list[int]:
        """The rows that are to come from each rank, as far as `out` says."""
        if not self._listed:
            return [ANY] * ranks
        assert self.out is not None
        if len(self.out) != ranks:
            raise ValueError(f"out must have one array per rank: {ranks}, not {len(self.out)}")
        return [require_alike(piece, have).count for piece in self.out]

    def room(self, have: Rows) -> int:
        """The rows that are to come in all, as far as `out` says."""
        return ANY if self.out is None or self._listed else require_alike(self.out, have).count

    def promise(self) -> Any:
        """The result, as far as it is known before the counts."""
        known = self.out is not None and (self._listed or not self.pieces)
        return self.out if known else Later()

    def arrays(self, x: Array, have: Rows, counts: list[int]) -> tuple[list[Array], Any]:
        """One array per rank for so many rows each, and the result of the call."""
        if self._listed:
            found = self.takes(have, len(counts))
            if found != counts:
                raise ValueError(f"the arrays of out have {found} rows, but {counts} come")
            return list(self.out or ()), self.out
        out = self.out
        if out is None:
            out = empty(x, (sum(counts), *have.shape))
        elif self.room(have) != sum(counts):
            raise ValueError(f"out has {self.room(have)} rows, but {sum(counts)} come: {counts}")
        pieces = split(out, counts)
        return pieces, (pieces if self.pieces else out)


def require_alike(array: Array, have: Rows) -> Rows:
    """The rows of `array`. Raises `ValueError` if they are not such as those of `have`."""
    found = rows(array, "out")
    if (found.dtype, found.nbytes) != (have.dtype, have.nbytes):
        raise ValueError(f"rows of {_text(have)} do not go with rows of {_text(found)}")
    return found


def checked(counts: Iterable[Any], ranks: int, what: str) -> list[int]:
    """Counts as a list, one per rank. Raises `TypeError` or `ValueError`."""
    try:
        found = [operator.index(count) for count in counts]
    except TypeError:
        raise TypeError(f"{what} must be whole numbers, one per rank") from None
    if len(found) != ranks or min(found) < 0:
        raise ValueError(f"{what} must be {ranks} numbers from 0 up, not {found}")
    return found


def table_of(counts: Any, ranks: int) -> Table | None:
    """Counts from each rank to each, if that is what they are."""
    if not len(counts) or not hasattr(counts[0], "__len__"):
        return None
    if len(counts) != ranks:
        raise ValueError(f"a table of send_counts has {ranks} rows, not {len(counts)}")
    return np.array([checked(row, ranks, "each row of send_counts") for row in counts], np.int64)


def require_sum(counts: list[int], have: Rows, what: str) -> None:
    """Raises `ValueError` unless the counts make up all rows of x."""
    if sum(counts) != have.count:
        raise ValueError(f"x has {have.count} rows, but {what} add up to {sum(counts)}: {counts}")


def _text(row: Rows) -> str:
    return f"{list(row.shape)} elements of {row.dtype.name.lower()}"
