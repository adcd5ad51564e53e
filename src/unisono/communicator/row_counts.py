"""Arrays as rows of their leading dimension: splits them into pieces, checks their numbers of rows,
and prepares output buffers.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono.communicator.arrays import Array, dtype_of, empty_like
from unisono.communicator.engine import DeferredResult
from unisono.types import DType

ANY = -1
"""Stands for a number of rows that only the other rank of a transfer knows."""

_MOST_BYTES = (1 << 63) - 1  # length limit of an array in bytes

Counts: TypeAlias = Sequence[int]
"""Rows of each rank: a list or an integer array."""

Table: TypeAlias = NDArray[np.int64]
"""Rows from each rank (first axis) to each rank (second axis)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """An array as `count` rows of its leading dimension; `shape` and `nbytes` describe one row."""

    count: int
    shape: tuple[int, ...]
    nbytes: int
    dtype: DType


def rows(array: Array, what: str) -> Rows:
    """Returns the rows of an array. Raises `TypeError`, `ValueError` or `UnsupportedError`.

    >>> rows(np.zeros((3, 4), np.float32), "x")
    Rows(count=3, shape=(4,), nbytes=16, dtype=<DType.FLOAT32: 0>)
    """
    dtype = dtype_of(array, f"{what}: ")
    if not len(array.shape):
        raise ValueError(
            f"{what}: expected an array with rows, but it has no dimensions: use shape (1,)"
        )
    shape = tuple(array.shape[1:])
    nbytes = math.prod(shape) * dtype.size_bytes
    return Rows(count=array.shape[0], shape=shape, nbytes=nbytes, dtype=dtype)


def split(array: Array, counts: Sequence[int]) -> list[Array]:
    """Returns views of consecutive rows; view i has `counts[i]` rows.

    >>> [piece.tolist() for piece in split(np.arange(4), [1, 0, 3])]
    [[0], [], [1, 2, 3]]
    """
    ends = list(itertools.accumulate(counts))
    return [array[end - count : end] for count, end in zip(counts, ends, strict=True)]


class RowBuffer(NamedTuple):
    """The argument `out` of a call that receives rows from all ranks. If `pieces` is True, the call
    returns one array per rank.
    """

    out: Array | Sequence[Array] | None
    pieces: bool

    @property
    def _listed(self) -> bool:
        return isinstance(self.out, (list, tuple))

    def to_receive(self, have: Rows, ranks: int) -> list[int]:
        """Returns the number of rows that `out` has for each rank; `ANY` (unknown) unless `out` is
        a list.
        """
        if not self._listed:
            return [ANY] * ranks
        assert self.out is not None
        if len(self.out) != ranks:
            raise ValueError(f"out: expected one array per rank, {ranks}, not {len(self.out)}")
        return [
            require_alike(piece, have, f"out[{rank}]").count for rank, piece in enumerate(self.out)
        ]

    def capacity(self, have: Rows) -> int:
        """Returns the total number of rows of `out`; `ANY` (unknown) unless `out` is a single
        array.
        """
        return (
            ANY if self.out is None or self._listed else require_alike(self.out, have, "out").count
        )

    def require(self, have: Rows, counts: list[int]) -> None:
        """Raises `ValueError` unless `out` fits exactly `counts[r]` rows from each rank r."""
        if self._listed and (found := self.to_receive(have, len(counts))) != counts:
            raise ValueError(f"out: expected arrays of {counts} rows, but they have {found}")
        capacity = self.capacity(have)
        if capacity not in (ANY, sum(counts)):
            raise ValueError(
                f"out: expected {sum(counts)} rows, the sum of {counts}, but it has {capacity}"
            )

    def known_result(self) -> Any:
        """Returns the call's result if it does not depend on the counts of other ranks, else a
        `DeferredResult`.
        """
        known = self.out is not None and (self._listed or not self.pieces)
        return self.out if known else DeferredResult()

    def arrays(self, x: Array, have: Rows, counts: list[int]) -> tuple[list[Array], Any]:
        """Returns one array of `counts[r]` rows for each rank r, and the result of the call. Raises
        the errors of `require`.
        """
        self.require(have, counts)
        out, result = self.prepared(x, have, counts)
        if isinstance(out, list):
            return out, result
        pieces = result if self.pieces else split(out, counts)
        return pieces, result

    def prepared(self, x: Array, have: Rows, counts: list[int]) -> tuple[Array | list[Array], Any]:
        """Returns an array for the rows of all ranks, or a list of one array per rank, and the
        result of the call. The caller has checked the counts by `require`.
        """
        if self._listed:
            return list(self.out or ()), self.out
        out = self.out
        if out is None:
            if sum(counts) * have.nbytes > _MOST_BYTES:
                raise ValueError(
                    f"counts: {sum(counts)} rows of {have.nbytes} bytes exceed any memory"
                )
            out = empty_like(x, (sum(counts), *have.shape))
        return out, (split(out, counts) if self.pieces else out)


def require_alike(array: Array, have: Rows, what: str, other: str = "x") -> Rows:
    """Returns `array` as rows. Error texts call `array` by the name `what`, and call the
    array that `have` describes by the name `other`.

    Raises `ValueError` unless the rows of `array` have the type and size of the rows in `have`.
    """
    found = rows(array, what)
    if (found.dtype, found.nbytes) != (have.dtype, have.nbytes):
        shape = ", ".join(["rows", *map(str, have.shape)])
        raise ValueError(
            f"{what} has rows of {_text(found)}, but {other} has rows of {_text(have)}: {what} "
            f"must have shape ({shape}) and type {have.dtype.name.lower()}"
        )
    return found


def require_share(out: Array, have: Rows, count: int, rank: int) -> None:
    """Raises `ValueError` unless `out` has the type and size of `count` rows of x."""
    found = dtype_of(out)
    if found is not have.dtype or math.prod(out.shape) * found.size_bytes != count * have.nbytes:
        raise ValueError(
            f"out has shape {tuple(out.shape)} of {found.name.lower()}, but by counts rank {rank} "
            f"gets {count} rows of x: shape {(count, *have.shape)} of {have.dtype.name.lower()}"
        )


def checked(counts: Iterable[Any], ranks: int, what: str) -> list[int]:
    """Returns the counts as a list with one count per rank. Raises `TypeError` or `ValueError`.

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
    """Returns the numbers of rows from each rank to each rank; None unless `counts` is
    two-dimensional.
    """
    if not hasattr(counts, "__len__") or not len(counts) or not hasattr(counts[0], "__len__"):
        return None
    if len(counts) != ranks:
        raise ValueError(f"send_counts: expected a table of {ranks} rows, not {len(counts)}")
    return np.array(
        [checked(row, ranks, f"send_counts[{rank}]") for rank, row in enumerate(counts)], np.int64
    )


def require_sum(counts: list[int], have: Rows, what: str) -> None:
    """Raises `ValueError` unless the counts add up to the number of rows of x."""
    if sum(counts) != have.count:
        raise ValueError(f"x has {have.count} rows, but {what} add up to {sum(counts)}: {counts}")


def _text(row: Rows) -> str:
    return f"{list(row.shape)} elements of {row.dtype.name.lower()}"
