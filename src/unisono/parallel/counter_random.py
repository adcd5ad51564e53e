"""Random numbers that do not depend on the layout: an element's value depends on its index only.

A rank that holds a shard of a tensor draws the same values for it as a rank that holds the whole
tensor. So initial weights and dropout masks equal those of a single process. The generator is
Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): element i of a stream
is a function of the key and i alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

_WORDS = 4  # Philox makes this many random numbers from each value of its counter


class Block(TypedDict, total=False):
    """A part of a tensor: `sizes` elements from `start` on. By default the whole tensor."""

    start: Sequence[int]
    sizes: Sequence[int]


class CounterRandom:
    """Random tensors from a seed and a `site`, which says what they are for.

    A `site` is a string such as a parameter's name.

    `shape` is the shape of the whole tensor. The arguments of `Block` select the part to draw.

    >>> random = CounterRandom(seed=7)
    >>> whole = random.normal("embedding", (6, 4))
    >>> half = random.normal("embedding", (6, 4), start=(0, 2), sizes=(6, 2))
    >>> torch.equal(half, whole[:, 2:])
    True
    """

    def __init__(self, seed: int) -> None:
        """The `seed` may be any integer."""
        self.seed = seed

    def uniform(
        self, site: str, shape: Sequence[int], *, step: int = 0, **block: Unpack[Block]
    ) -> torch.Tensor:
        """Returns float64 values strictly between 0 and 1, of shape `sizes`.

        Raises `ValueError` if the block reaches beyond the shape.
        """
        start, sizes = _checked(shape, block)
        drawn = np.empty(math.prod(sizes))
        filled = 0
        for first, count in _runs(shape, start, sizes):
            drawn[filled : filled + count] = self._draw(site, step, first, count)
            filled += count
        return torch.from_numpy(drawn).reshape(tuple(sizes))

    def normal(
        self, site: str, shape: Sequence[int], *, step: int = 0, **block: Unpack[Block]
    ) -> torch.Tensor:
        """Returns float64 values of the standard normal distribution, of shape `sizes`."""
        values: torch.Tensor = torch.special.ndtri(self.uniform(site, shape, step=step, **block))
        return values

    def keep_mask(
        self,
        site: str,
        shape: Sequence[int],
        *,
        drop: float,
        step: int = 0,
        **block: Unpack[Block],
    ) -> torch.Tensor:
        """Returns a dropout mask, whose elements are True with a probability of `1 - drop`."""
        if not 0 <= drop < 1:
            raise ValueError(f"drop: expected a probability from 0 to below 1, got {drop}")
        return self.uniform(site, shape, step=step, **block) >= drop

    def _draw(self, site: str, step: int, first: int, count: int) -> NDArray[np.float64]:
        """Returns `count` values of a random stream, from value `first` on."""
        key = blake2b(f"{self.seed}/{step}/{site}".encode(), digest_size=16).digest()
        stream = np.random.Philox(key=int.from_bytes(key, "little"))
        stream.advance(first // _WORDS)
        words = stream.random_raw(first % _WORDS + count)[first % _WORDS :]
        # The sum of a 52-bit integer and 0.5 is exact in float64, so no value rounds to 1.
        values: NDArray[np.float64] = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return values


def _checked(shape: Sequence[int], block: Block) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the start and sizes of a block. Raises `ValueError` if it exceeds the shape."""
    start = block.get("start", [0] * len(shape))
    sizes = block.get("sizes", shape)
    fits = len(start) == len(sizes) == len(shape) and all(
        first >= 0 and size >= 0 and first + size <= length
        for first, size, length in zip(start, sizes, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"expected a block inside the shape {tuple(shape)}, got {tuple(sizes)} elements from "
            f"{tuple(start)} on"
        )
    return start, sizes


def _runs(
    shape: Sequence[int], start: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yields (first element, count) of the block's contiguous runs, in row-major order."""
    # From dimension `whole` on, the block is as long as the tensor, so runs extend over these
    # dimensions.
    whole = len(shape)
    while whole > 0 and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    inner = max(0, whole - 1)
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    count = math.prod(sizes[inner:])
    if count == 0:
        return
    base = sum(first * stride for first, stride in zip(start, strides, strict=True))
    for place in itertools.product(*(range(size) for size in sizes[:inner])):
        yield base + sum(map(math.prod, zip(place, strides, strict=False))), count
