"""Test data: the input of each rank, and the expected result.

A rank's data are repetitions of one tile of hashed values. The length of the tile is a prime, so
data at an offset of one block, slot or piece do not match. All values and results are small
integers that every element type represents exactly, so results are compared for equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.bench.cases import LOGICAL, PAIRS, Case
from unisono.execution import narrowed
from unisono.types import DType

Array = NDArray[Any]
Integers = NDArray[np.int64]

TILE_COUNT = 65_521
_GARBAGE = 0xA5
_COPY_BITS = {
    "float16": 11,
    "bfloat16": 8,
    "float8_e4m3fn": 4,
    "float8_e5m2": 3,
    "int8": 7,
    "uint8": 8,
    "int16": 15,
    "uint16": 16,
}
_SUM_BITS, _FLOAT8_SUM_BITS = 3, 1
_LOGICAL_BITS = 2
_MOST_ADDED = 8
"""Maximum number of ranks that contribute a value other than zero to an element, so that sums are
exact."""
_EXCHANGES = 2
"""Number of verified exchanges of messages. Their data differ, so that data of the previous
exchange count as wrong."""
_STRIDE = 1009
"""Elements of the tile between the starts of two successive messages."""
_INDEX_BITS = 20
_INDEX_MASK = (1 << _INDEX_BITS) - 1


def _maxloc(a: Integers, b: Integers) -> Integers:
    """Returns the pair with the larger value. Of equal values, returns the pair with the lower
    index."""
    largest: Integers = np.maximum(a ^ _INDEX_MASK, b ^ _INDEX_MASK)
    return largest ^ _INDEX_MASK


_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
    "minloc": np.minimum,
    "maxloc": _maxloc,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Elements [offset, offset + count) of a buffer. They repeat the elements of `tile`, beginning
    with the tile's element `start`."""

    offset: int
    count: int
    start: int
    tile: Array

    @property
    def rotated(self) -> Array:
        """The tile, rotated to begin at `start`."""
        return np.roll(self.tile, -(self.start % TILE_COUNT))


def allocate(
    case: Case, rank: int, empty: Callable[[int, np.dtype[Any]], Array] = np.empty
) -> tuple[Array, Array]:
    """Allocates a rank's buffers x and out with `empty`. If the result is written to x, out has
    length 0."""
    if case.operation.paired:
        sent, received = prod(case.sends(rank)), prod(case.receives(rank))
        return empty(sent, case.storage), empty(received, case.storage)
    operation, piece, total = case.operation, case.piece(rank), case.count
    out_count = 0 if operation.in_place else total if operation.out_split else piece
    x = empty(total if operation.x_split else piece, case.storage)
    return x, empty(out_count, case.storage)


def cut(array: Array, messages: int) -> list[Array]:
    """Splits the array into `messages` messages of equal length."""
    return list(array.reshape(messages, array.size // messages))


def count_wrong(case: Case, rank: int, x: Array, out: Array, call: Callable[[], object]) -> int:
    """Performs one call on known data. Returns the number of wrong elements of the result.

    Messages between pairs are exchanged several times, with different data each time.
    """
    result = x if case.operation.in_place else out
    wrong = 0
    for exchange in range(_EXCHANGES if case.operation.paired else 1):
        for segment in _given(case, rank, exchange, x.size):
            _write(x, segment)
        out.view(np.uint8).fill(_GARBAGE)
        call()
        wrong += sum(
            _count_wrong_in(result, segment) for segment in _expected(case, rank, exchange)
        )
    return wrong


def _given(case: Case, rank: int, exchange: int, count: int) -> Iterator[Segment]:
    """Yields the segments that make up a rank's input x before a call."""
    if case.operation.paired:
        yield from _messages(case, rank, exchange)
    else:
        yield Segment(offset=0, count=count, start=0, tile=_encode(case, _values(case, rank)))


def _messages(case: Case, source: int, exchange: int) -> Iterator[Segment]:
    """Yields the messages that a rank sends to its partner. The messages begin at different
    elements of the tile."""
    tile = _encode(case, _values(case, source))
    messages, count = case.sends(source)
    for number in range(messages):
        start = (exchange * messages + number + 1) * _STRIDE
        yield Segment(offset=number * count, count=count, start=start, tile=tile)


def _expected(case: Case, rank: int, exchange: int) -> Iterator[Segment]:
    operation, base = case.operation, case.op.removesuffix("_v")
    if operation.paired:
        yield from _messages(case, rank ^ 1, exchange)
        return
    if base == "barrier" or (base in ("reduce", "gather") and rank != case.root):
        return
    offset = 0
    for source in _sources(case, rank):
        # If x is split, the result has only this rank's piece of each source's data.
        lengths = case.lengths(source)
        start, count = 0, case.piece(source)
        if operation.x_split:
            start, count = sum(lengths[:rank]), lengths[rank]
        tile = _reduced(case, rank) if operation.reduces else _encode(case, _values(case, source))
        yield Segment(offset=offset, count=count, start=start, tile=tile)
        offset += count


def _sources(case: Case, rank: int) -> range:
    """Returns the ranks whose data are in this rank's result, in the order of pieces. For a
    reduction, returns only this rank, because `_reduced` combines the data of the ranks."""
    if case.operation.reduces:
        return range(rank, rank + 1)
    if case.operation.out_split:
        return range(case.ranks)
    shifts = case.op in ("send_recv", "put")
    source = (rank - 1) % case.ranks if shifts else case.root
    return range(source, source + 1)


def _values(case: Case, rank: int) -> Integers:
    """Returns one tile of the rank's data as integers. The value and the index of a pair are in one
    integer."""
    mixed = _hashed(rank)
    redop = case.redop if case.operation.reduces else ""
    if case.dtype == "bool":
        return mixed >> 31
    if redop in LOGICAL:
        # If only one rank contributes, some libraries return its value unchanged, others return 0
        # or 1. The values are then 0 and 1, for which both results are equal.
        alone = case.ranks == 1 or case.operation.scans
        return mixed >> (31 if alone else 32 - _LOGICAL_BITS)
    if redop == "avg":
        return _around_average(case, rank)
    if redop not in ("sum", "prod"):
        return mixed >> (32 - _COPY_BITS.get(case.dtype, 23))
    # The factors of a product are 1 and 2.
    bits = _FLOAT8_SUM_BITS if redop == "prod" or "float8" in case.dtype else _SUM_BITS
    adds = (np.arange(TILE_COUNT) + rank) % case.ranks < _MOST_ADDED
    return (mixed >> (32 - bits)) * adds + (redop == "prod")


def _around_average(case: Case, rank: int) -> Integers:
    """Returns values whose average over all ranks is 2 or 3. The two ranks of a pair deviate from
    the average by opposite amounts."""
    average = 2 + (_hashed(case.ranks) >> 31)
    above = _hashed(rank // 2) >> 31
    if rank % 2:
        return average - above
    return average + above * (rank + 1 < case.ranks)


@lru_cache(maxsize=64)
def _hashed(number: int) -> Integers:
    """Returns a read-only tile of hashed 32-bit numbers."""
    mixed = np.arange(1, TILE_COUNT + 1, dtype=np.uint32) * np.uint32(2_654_435_761)
    mixed += np.uint32((number + 1) * 0x9E37_79B9 & 0xFFFF_FFFF)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(2_246_822_519)
    tile = mixed.astype(np.int64)
    tile.flags.writeable = False
    return tile


def _reduced(case: Case, rank: int) -> Array:
    """Returns a rank's expected result of a reduction. In an exscan, rank 0 keeps its input."""
    folded = {"scan": rank + 1, "exscan": max(1, rank)}.get(case.op, case.ranks)
    total = reduce(_FOLDS[case.redop], (_values(case, source) for source in range(folded)))
    if case.redop == "avg":
        total //= case.ranks
    return _encode(case, total)


def _encode(case: Case, values: Integers) -> Array:
    """Converts values to the element type of the case. The conversion is linear, so it commutes
    with sums."""
    if case.dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32) >> np.uint32(16)
        return bits.astype(np.uint16)
    if case.dtype.startswith("float8"):
        return narrowed(values.astype(np.float32), DType[case.dtype.upper()])
    if case.dtype.startswith("complex"):
        return (values * (1 - 2j)).astype(case.storage)
    if case.dtype in PAIRS:
        pairs = np.empty(values.shape, case.storage)
        pairs["value"], pairs["index"] = values >> _INDEX_BITS, values & _INDEX_MASK
        return pairs
    return values.astype(case.storage)


def _write(x: Array, segment: Segment) -> None:
    target, tile = x[segment.offset : segment.offset + segment.count], segment.rotated
    whole = target.size // TILE_COUNT * TILE_COUNT
    target[:whole].reshape(-1, TILE_COUNT)[:] = tile
    target[whole:] = tile[: target.size - whole]


def _count_wrong_in(result: Array, segment: Segment) -> int:
    actual, tile = result[segment.offset : segment.offset + segment.count], segment.rotated
    whole = segment.count // TILE_COUNT * TILE_COUNT
    wrong = np.count_nonzero(actual[:whole].reshape(-1, TILE_COUNT) != tile)
    wrong += np.count_nonzero(actual[whole:] != tile[: segment.count - whole])
    return int(wrong)
