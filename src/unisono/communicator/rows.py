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

_MOST_BYTES = (1 << 63) - 1  # of an array

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
    dtype = dtype_of(array, f"{what}: ")
    if not len(array.shape):
        raise ValueError(f"{what} has no leading axis, so no rows: give it shape (1,)")
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


class RowBuffer(NamedTuple):
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
        return [
            require_alike(piece, have, f"out[{rank}]").count for rank, piece in enumerate(self.out)
        ]

    def room(self, have: Rows) -> int:
        """The rows that are to come in all, as far as `out` says."""
        return (
            ANY if self.out is None or self._listed else require_alike(self.out, have, "out").count
        )

    def require(self, have: Rows, counts: list[int]) -> None:
        """Raises `ValueError` unless there is room for just so many rows from each rank."""
        if self._listed and (found := self.takes(have, len(counts))) != counts:
            raise ValueError(f"the arrays of out have {found} rows, but {counts} come")
        room = self.room(have)
        if room not in (ANY, sum(counts)):
            raise ValueError(f"out has {room} rows, but {sum(counts)} come: {counts}")

    def promise(self) -> Any:
        """The result, as far as it is known before the counts."""
        known = self.out is not None and (self._listed or not self.pieces)
        return self.out if known else Later()

    def arrays(self, x: Array, have: Rows, counts: list[int]) -> tuple[list[Array], Any]:
        """One array per rank for so many rows each, and the result of the call."""
        self.require(have, counts)
        if self._listed:
            return list(self.out or ()), self.out
        out = self.out
        if out is None:
            if sum(counts) * have.nbytes > _MOST_BYTES:
                raise ValueError(f"no memory holds {sum(counts)} rows of {have.nbytes} bytes")
            out = empty(x, (sum(counts), *have.shape))
        pieces = split(out, counts)
        return pieces, (pieces if self.pieces else out)


def require_alike(array: Array, have: Rows, what: str, other: str = "x") -> Rows:
    """The rows of `array`, called `what`. Raises `ValueError` if they are not such as those of
    `have`, which are called `other`."""
    found = rows(array, what)
    if (found.dtype, found.nbytes) != (have.dtype, have.nbytes):
        shape = ", ".join(["rows", *map(str, have.shape)])
        raise ValueError(
            f"{what} has rows of {_text(found)}, but {other} has rows of {_text(have)}: {what} "
            f"must have shape ({shape}) and type {have.dtype.name.lower()}"
        )
    return found


def require_share(out: Array, have: Rows, count: int, rank: int) -> None:
    """Raises `ValueError` unless `out` holds just as much as the `count` rows of x that come."""
    found = dtype_of(out)
    if found is not have.dtype or math.prod(out.shape) * found.size_bytes != count * have.nbytes:
        raise ValueError(
            f"out has shape {tuple(out.shape)} of {found.name.lower()}, but by counts rank {rank} "
            f"gets {count} rows of x: shape {(count, *have.shape)} of {have.dtype.name.lower()}"
        )


def checked(counts: Iterable[Any], ranks: int, what: str) -> list[int]:
    """Counts as a list, one per rank. Raises `TypeError` or `ValueError`.

    >>> checked([1, 2.5], 2, "counts")
    Traceback (most recent call last):
    TypeError: counts must be 2 whole numbers, one per rank, not [1, 2.5]
    """
    try:
        found = [operator.index(count) for count in counts]
    except TypeError:
        raise TypeError(
            f"{what} must be {ranks} whole numbers, one per rank, not {counts!r:.60}"
        ) from None
    if len(found) != ranks or min(found) < 0:
        raise ValueError(f"{what} must be {ranks} numbers from 0 up, one per rank, not {found}")
    return found


def table_of(counts: Any, ranks: int) -> Table | None:
    """Counts from each rank to each, if that is what they are."""
    if not hasattr(counts, "__len__") or not len(counts) or not hasattr(counts[0], "__len__"):
        return None
    if len(counts) != ranks:
        raise ValueError(f"send_counts as a table must have {ranks} rows, not {len(counts)}")
    return np.array(
        [checked(row, ranks, f"send_counts[{rank}]") for rank, row in enumerate(counts)], np.int64
    )


def require_sum(counts: list[int], have: Rows, what: str) -> None:
    """Raises `ValueError` unless the counts make up all rows of x."""
    if sum(counts) != have.count:
        raise ValueError(f"x has {have.count} rows, but {what} add up to {sum(counts)}: {counts}")


def _text(row: Rows) -> str:
    return f"{list(row.shape)} elements of {row.dtype.name.lower()}"
