"""Data that shows every mistake: what each rank puts in, and what it must find afterwards.

A rank's data repeats one tile of hashed values. The tile's length is a prime, so that data
landing one block, slot or piece off never fits. All values are small integers, exact in every
type, and so is every result: comparisons are for equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.bench.cases import Case

Array = NDArray[Any]

TILE_COUNT = 65_521
_GARBAGE = 0xA5
_COPY_BITS = {"float16": 11, "bfloat16": 8, "int8": 7, "uint8": 8, "int16": 15, "uint16": 16}
_SUM_BITS = 3
_FOLDS = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Elements [offset, offset + count) of a buffer hold a tile's elements from `start` on."""

    offset: int
    count: int
    start: int
    tile: Array


def allocate(case: Case) -> tuple[Array, Array]:
    """A rank's x and out. out has length 0 where the result lands in x."""
    operation, piece, total = case.operation, case.piece_count, case.count
    out_count = 0 if operation.in_place else total if operation.out_split else piece
    x = np.empty(total if operation.x_split else piece, case.storage)
    return x, np.empty(out_count, case.storage)


def count_wrong(case: Case, rank: int, x: Array, out: Array, call: Callable[[], object]) -> int:
    """Perform one call on known data; elements that it left other than they must be."""
    _write(x, _encode(case, _values(case, rank)))
    out.view(np.uint8).fill(_GARBAGE)
    call()
    result = x if case.operation.in_place else out
    return sum(_count_wrong_in(result, segment) for segment in _expected(case, rank))


def _expected(case: Case, rank: int) -> Iterator[Segment]:
    operation, piece = case.operation, case.piece_count
    if case.op == "barrier" or (case.op in ("reduce", "gather") and rank != case.root):
        return
    # Where x is split, a rank receives its own piece of what the sources hold.
    start = rank * piece if operation.x_split else 0
    if operation.reduces:
        yield Segment(offset=0, count=piece, start=start, tile=_reduced(case, rank))
        return
    for index, source in enumerate(_sources(case, rank)):
        tile = _encode(case, _values(case, source))
        yield Segment(offset=index * piece, count=piece, start=start, tile=tile)


def _sources(case: Case, rank: int) -> range:
    """Ranks whose data a copying operation leaves here, in the order of the pieces."""
    if case.operation.out_split:
        return range(case.ranks)
    source = (rank - 1) % case.ranks if case.op == "send_recv" else case.root
    return range(source, source + 1)


def _values(case: Case, rank: int) -> NDArray[np.int64]:
    """One tile of the rank's data as integers."""
    mixed = np.arange(1, TILE_COUNT + 1, dtype=np.uint32) * np.uint32(2_654_435_761)
    mixed += np.uint32((rank + 1) * 0x9E37_79B9 & 0xFFFF_FFFF)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(2_246_822_519)
    summed = case.operation.reduces and case.redop in ("sum", "avg", "prod")
    bits = _SUM_BITS if summed else _COPY_BITS.get(case.dtype, 23)
    values = (mixed >> np.uint32(32 - bits)).astype(np.int64)
    if case.dtype == "bool":
        return values & 1
    if case.operation.reduces and case.redop == "avg":
        return (values & 1) * case.ranks  # so that the average is exact in integers as well
    if case.operation.reduces and case.redop == "prod":
        return (values & 1) + 1
    return values


def _reduced(case: Case, rank: int) -> Array:
    """What a rank finds; rank 0 of an exscan what it had."""
    folded = {"scan": rank + 1, "exscan": max(1, rank)}.get(case.op, case.ranks)
    total = reduce(_FOLDS[case.redop], (_values(case, source) for source in range(folded)))
    if case.redop == "avg":
        total //= case.ranks
    return _encode(case, total)


def _encode(case: Case, values: NDArray[np.int64]) -> Array:
    """The values as the case's type stores them. Linear, so it commutes with sums."""
    if case.dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32) >> np.uint32(16)
        return bits.astype(np.uint16)
    if case.dtype.startswith("complex"):
        return (values * (1 - 2j)).astype(case.storage)
    return values.astype(case.storage)


def _write(x: Array, tile: Array) -> None:
    whole = x.size // TILE_COUNT * TILE_COUNT
    x[:whole].reshape(-1, TILE_COUNT)[:] = tile
    x[whole:] = tile[: x.size - whole]


def _count_wrong_in(result: Array, segment: Segment) -> int:
    actual = result[segment.offset : segment.offset + segment.count]
    tile = np.roll(segment.tile, -(segment.start % TILE_COUNT))
    whole = segment.count // TILE_COUNT * TILE_COUNT
    wrong = np.count_nonzero(actual[:whole].reshape(-1, TILE_COUNT) != tile)
    wrong += np.count_nonzero(actual[whole:] != tile[: segment.count - whole])
    return int(wrong)
