"""Data that shows every mistake: what each rank puts in, and what it must find afterwards.

A rank's data repeats one tile of hashed values. The tile's length is a prime, so that data
landing one block, slot or piece off never fits. All values are small integers, exact in every
type, and so is every result: comparisons are for equality.
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
"""So many ranks have something other than nothing to add to an element: sums stay exact."""
_TURNS = 2
"""So often messages are exchanged to be verified: what is left over from before then shows."""
_STRIDE = 1009
"""Elements of the tile from the begin of one message to that of the next."""
_INDEX_BITS = 20
_INDEX_MASK = (1 << _INDEX_BITS) - 1


def _maxloc(a: Integers, b: Integers) -> Integers:
    """The larger value, of equal ones the lower index."""
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
    """Elements [offset, offset + count) of a buffer hold a tile's elements from `start` on."""

    offset: int
    count: int
    start: int
    tile: Array

    @property
    def turned(self) -> Array:
        """A tile from `start` on."""
        return np.roll(self.tile, -(self.start % TILE_COUNT))


def allocate(case: Case, rank: int) -> tuple[Array, Array]:
    """A rank's x and out. out has length 0 where the result lands in x."""
    if case.operation.paired:
        sent, received = prod(case.sends(rank)), prod(case.receives(rank))
        return np.empty(sent, case.storage), np.empty(received, case.storage)
    operation, piece, total = case.operation, case.piece(rank), case.count
    out_count = 0 if operation.in_place else total if operation.out_split else piece
    x = np.empty(total if operation.x_split else piece, case.storage)
    return x, np.empty(out_count, case.storage)


def cut(array: Array, messages: int) -> list[Array]:
    """The array as so many messages of one length."""
    return list(array.reshape(messages, array.size // messages))


def count_wrong(case: Case, rank: int, x: Array, out: Array, call: Callable[[], object]) -> int:
    """Perform one call on known data; elements that it left other than they must be.

    Messages between pairs are exchanged several times, each with other data.
    """
    result = x if case.operation.in_place else out
    wrong = 0
    for turn in range(_TURNS if case.operation.paired else 1):
        for segment in _given(case, rank, turn, x.size):
            _write(x, segment)
        out.view(np.uint8).fill(_GARBAGE)
        call()
        wrong += sum(_count_wrong_in(result, segment) for segment in _expected(case, rank, turn))
    return wrong


def _given(case: Case, rank: int, turn: int, count: int) -> Iterator[Segment]:
    """What a rank has in x before a call."""
    if case.operation.paired:
        yield from _messages(case, rank, turn)
    else:
        yield Segment(offset=0, count=count, start=0, tile=_encode(case, _values(case, rank)))


def _messages(case: Case, source: int, turn: int) -> Iterator[Segment]:
    """What a rank sends to its partner: no two messages begin alike."""
    tile = _encode(case, _values(case, source))
    messages, count = case.sends(source)
    for number in range(messages):
        start = (turn * messages + number + 1) * _STRIDE
        yield Segment(offset=number * count, count=count, start=start, tile=tile)


def _expected(case: Case, rank: int, turn: int) -> Iterator[Segment]:
    operation, base = case.operation, case.op.removesuffix("_v")
    if operation.paired:
        yield from _messages(case, rank ^ 1, turn)
        return
    if base == "barrier" or (base in ("reduce", "gather") and rank != case.root):
        return
    offset = 0
    for source in _sources(case, rank):
        # Where x is split, a rank receives its own piece of what the sources hold.
        lengths = case.lengths(source)
        start, count = 0, case.piece(source)
        if operation.x_split:
            start, count = sum(lengths[:rank]), lengths[rank]
        tile = _reduced(case, rank) if operation.reduces else _encode(case, _values(case, source))
        yield Segment(offset=offset, count=count, start=start, tile=tile)
        offset += count


def _sources(case: Case, rank: int) -> range:
    """Ranks whose data an operation leaves here, in the order of the pieces; for all whose data it
    combines, this one."""
    if case.operation.reduces:
        return range(rank, rank + 1)
    if case.operation.out_split:
        return range(case.ranks)
    source = (rank - 1) % case.ranks if case.op == "send_recv" else case.root
    return range(source, source + 1)


def _values(case: Case, rank: int) -> Integers:
    """One tile of the rank's data as integers; of pairs, value and index in one."""
    mixed = _hashed(rank)
    redop = case.redop if case.operation.reduces else ""
    if case.dtype == "bool":
        return mixed >> 31
    if redop in LOGICAL:
        # Libraries differ in what becomes of a contribution that is combined with no other.
        alone = case.ranks == 1 or case.operation.scans
        return mixed >> (31 if alone else 32 - _LOGICAL_BITS)
    if redop == "avg":
        return _around_average(case, rank)
    if redop not in ("sum", "prod"):
        return mixed >> (32 - _COPY_BITS.get(case.dtype, 23))
    # A product's factors are 1 and 2.
    bits = _FLOAT8_SUM_BITS if redop == "prod" or "float8" in case.dtype else _SUM_BITS
    adds = (np.arange(TILE_COUNT) + rank) % case.ranks < _MOST_ADDED
    return (mixed >> (32 - bits)) * adds + (redop == "prod")


def _around_average(case: Case, rank: int) -> Integers:
    """2 or 3, the average of all ranks, or beside it: as much above as the next rank is below."""
    average = 2 + (_hashed(case.ranks) >> 31)
    above = _hashed(rank // 2) >> 31
    if rank % 2:
        return average - above
    return average + above * (rank + 1 < case.ranks)


@lru_cache(maxsize=64)
def _hashed(number: int) -> Integers:
    """A tile of 32-bit numbers, not to be written."""
    mixed = np.arange(1, TILE_COUNT + 1, dtype=np.uint32) * np.uint32(2_654_435_761)
    mixed += np.uint32((number + 1) * 0x9E37_79B9 & 0xFFFF_FFFF)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(2_246_822_519)
    tile = mixed.astype(np.int64)
    tile.flags.writeable = False
    return tile


def _reduced(case: Case, rank: int) -> Array:
    """What a rank finds; rank 0 of an exscan what it had."""
    folded = {"scan": rank + 1, "exscan": max(1, rank)}.get(case.op, case.ranks)
    total = reduce(_FOLDS[case.redop], (_values(case, source) for source in range(folded)))
    if case.redop == "avg":
        total //= case.ranks
    return _encode(case, total)


def _encode(case: Case, values: Integers) -> Array:
    """The values as the case's type stores them. Linear, so it commutes with sums."""
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
    target, tile = x[segment.offset : segment.offset + segment.count], segment.turned
    whole = target.size // TILE_COUNT * TILE_COUNT
    target[:whole].reshape(-1, TILE_COUNT)[:] = tile
    target[whole:] = tile[: target.size - whole]


def _count_wrong_in(result: Array, segment: Segment) -> int:
    actual, tile = result[segment.offset : segment.offset + segment.count], segment.turned
    whole = segment.count // TILE_COUNT * TILE_COUNT
    wrong = np.count_nonzero(actual[:whole].reshape(-1, TILE_COUNT) != tile)
    wrong += np.count_nonzero(actual[whole:] != tile[: segment.count - whole])
    return int(wrong)
