"""Rectangular blocks of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBlock:
    """A rectangular block of the tensor `name`. Raises `ValueError` if it exceeds the tensor."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    start: tuple[int, ...]
    """Index of the block's first element in the whole tensor, by dimension."""
    values: torch.Tensor
    """Elements of the block, in the block's shape: a view into the model's or optimizer's tensor,
    not a copy."""

    def __post_init__(self) -> None:
        sizes = tuple(self.values.shape)
        fits = len(self.shape) == len(self.start) == len(sizes) and all(
            first >= 0 and first + count <= length
            for first, count, length in zip(self.start, sizes, self.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{self.name}: expected a block inside the shape {self.shape}, got {sizes} "
                f"elements from {self.start} on"
            )


def flat_range_blocks(
    name: str,
    shape: Sequence[int],
    start: Sequence[int],
    sizes: Sequence[int],
    first: int,
    values: torch.Tensor,
) -> list[TensorBlock]:
    """Returns a contiguous range of a flattened block as rectangular blocks.

    The block begins at index `start` of a tensor of `shape`, and has `sizes` elements along the
    dimensions. `values` has one dimension and holds the block's elements from number `first` on, in
    row-major order. A range of a block of d dimensions is at most 2 d - 1 rectangles; each is a
    view of `values`. Raises `ValueError` for a range beyond the block.

    >>> found = flat_range_blocks("w", (4, 3), (0, 0), (4, 3), 2, torch.arange(2, 9))
    >>> [(block.start, block.values.tolist()) for block in found]
    [((0, 2), [[2]]), ((1, 0), [[3, 4, 5], [6, 7, 8]])]
    """
    count = values.numel()
    if first < 0 or first + count > math.prod(sizes):
        raise ValueError(
            f"{name}: expected a range inside {math.prod(sizes)} elements, got {count} from {first}"
        )
    found = []
    for place, extent, begin in _rectangles(tuple(sizes), first, count):
        corner = tuple(a + b for a, b in zip(start, place, strict=True))
        part = values[begin : begin + math.prod(extent)].view(extent)
        found.append(TensorBlock(name=name, shape=tuple(shape), start=corner, values=part))
    return found


def _rectangles(
    sizes: tuple[int, ...], first: int, count: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yields (start, sizes, offset in the range) for each rectangle of a flat range."""
    if count == 0:
        return
    if len(sizes) <= 1:
        yield (first,) * len(sizes), (count,) * len(sizes), 0
        return
    row, end = math.prod(sizes[1:]), first + count
    head = -first % row  # elements before the first whole row
    whole = max((count - head) // row, 0) if head <= count else 0
    if head:
        inner = min(head, count)
        for place, extent, begin in _rectangles(sizes[1:], first % row, inner):
            yield (first // row, *place), (1, *extent), begin
    if head <= count and whole:
        yield ((first + head) // row, *(0 for _ in sizes[1:])), (whole, *sizes[1:]), head
    rest = count - head - whole * row
    if rest > 0:
        for place, extent, begin in _rectangles(sizes[1:], 0, rest):
            yield ((end - rest) // row, *place), (1, *extent), count - rest + begin
