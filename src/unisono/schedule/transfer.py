"""Transfers between ranks, and their storage as columns of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, SupportsIndex, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.errors import ScheduleError

Column: TypeAlias = NDArray[np.int32]

_LEAST, _MOST = -(1 << 31), (1 << 31) - 1
_READ_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Move of `count` chunks from the locations of one rank to the locations of another rank, in
    one round.

    All transfers of a round read the state before the round. Their writes take effect after the
    round. With `src == dst` the move is local. A reducing transfer combines its chunk with the
    content of the destination. All reducing transfers of one round into one location form one n-ary
    reduction. The operands are in the order of their source ranks. The value of the destination has
    the position of the destination's rank.

    `channel` is the index of one of several parallel channels. The channel changes neither the data
    nor the order. Transfers of one round are unordered on all channels.
    """

    round: int
    src: int
    src_chunk: int
    dst: int
    dst_chunk: int
    count: int = 1
    reduce: bool = False
    channel: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Fields of many transfers. Each field is a read-only array of 32-bit integers or booleans.

    Writable arrays are copied. Raises `ScheduleError` for numbers that do not fit in 32 bits.

    >>> no, one = [0, 0], [1, 1]
    >>> c = Columns.of([0, 1], [0, 1], no, [1, 2], no, one, no, no)
    >>> len(c), c.dst
    (2, array([1, 2], dtype=int32))
    """

    round: Column
    src: Column
    src_chunk: Column
    dst: Column
    dst_chunk: Column
    count: Column
    reduce: NDArray[np.bool_]
    channel: Column

    def __post_init__(self) -> None:
        for name in FIELDS:
            values = getattr(self, name)
            column = _flags(values) if name == "reduce" else _integers(name, values)
            if column.shape != (len(self.round),):
                raise ScheduleError(
                    f"{name}: expected {len(self.round)} numbers in a row, got {column.shape}"
                )
            object.__setattr__(self, name, column)

    @classmethod
    def of(cls, *arrays: ArrayLike) -> Columns:
        """Returns columns made of arrays or similar values, in the order of the fields of
        `Transfer`.
        """
        return cls(**dict(zip(FIELDS, arrays, strict=True)))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.round)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        pairs = zip(self.arrays(), other.arrays(), strict=True)
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    def __hash__(self) -> int:
        return hash(tuple(array.tobytes() for array in self.arrays()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns.of, self.arrays()  # a plain copy would be writable

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Returns the columns in the order of the fields of `Transfer`."""
        return tuple(getattr(self, name) for name in FIELDS)

    def select(self, which: slice | NDArray[Any]) -> Columns:
        """Returns the transfers that a slice, indices or a mask selects."""
        return Columns.of(*(_frozen(array[which]) for array in self.arrays()))

    def rounds(self) -> Iterator[tuple[int, slice]]:
        """Yields the number and the slice of each non-empty round."""
        if len(self) == 0:
            return
        edges = np.flatnonzero(np.diff(self.round)) + 1
        stops = [*edges.tolist(), len(self)]
        starts = [0, *stops[:-1]]
        for number, start, stop in zip(self.round[starts].tolist(), starts, stops, strict=True):
            yield number, slice(start, stop)


FIELDS = tuple(field.name for field in fields(Transfer))


class Transfers(Sequence[Transfer]):
    """Columns as a sequence of `Transfer`. Access creates each `Transfer`.

    >>> transfers = Transfers.of([Transfer(round=0, src=0, src_chunk=0, dst=1, dst_chunk=0)])
    >>> transfers[0].dst, len(transfers + transfers), transfers.columns.src
    (1, 2, array([0], dtype=int32))
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    @classmethod
    def of(cls, transfers: Iterable[Transfer]) -> Transfers:
        """Stores transfers as columns."""
        if isinstance(transfers, Transfers):
            return transfers
        rows = [astuple(transfer) for transfer in transfers]
        return cls(Columns.of(*(list(zip(*rows, strict=True)) or [()] * len(FIELDS))))

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Transfer: ...
    @overload
    def __getitem__(self, index: slice) -> Transfers: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Transfer | Transfers:
        if isinstance(index, slice):
            return Transfers(self.columns.select(index))
        row = (array[index].item() for array in self.columns.arrays())
        return Transfer(**dict(zip(FIELDS, row, strict=True)))

    def __iter__(self) -> Iterator[Transfer]:
        for start in range(0, len(self), _READ_AT_ONCE):
            part = slice(start, start + _READ_AT_ONCE)
            for row in zip(*(array[part].tolist() for array in self.columns.arrays()), strict=True):
                yield Transfer(**dict(zip(FIELDS, row, strict=True)))

    def __add__(self, other: Iterable[Transfer]) -> Transfers:
        pairs = zip(self.columns.arrays(), Transfers.of(other).columns.arrays(), strict=True)
        return Transfers(Columns.of(*(_frozen(np.concatenate(pair)) for pair in pairs)))

    def __eq__(self, other: object) -> bool:
        return self.columns == other.columns if isinstance(other, Transfers) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.columns)

    def __repr__(self) -> str:
        first = [repr(transfer) for transfer in self[:8]]
        more = [f"... {len(self) - 8} more"] if len(self) > 8 else []
        return f"Transfers([{', '.join(first + more)}])"


def _integers(name: str, values: ArrayLike) -> Column:
    array = np.asarray(values)
    if array.size and (
        array.dtype.kind not in "iu" or int(array.min()) < _LEAST or int(array.max()) > _MOST
    ):
        raise ScheduleError(f"{name}: expected integers of 32 bits, got {_sample(array)}")
    return _frozen(array.astype(np.int32, copy=array.flags.writeable))


def _flags(values: ArrayLike) -> NDArray[np.bool_]:
    array = np.asarray(values)
    return _frozen(array.astype(np.bool_, copy=array.flags.writeable))


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


def _sample(array: NDArray[Any]) -> str:
    return (
        f"{array.dtype} {array.min()}..{array.max()}" if array.dtype.kind in "iu" else repr(array)
    )
