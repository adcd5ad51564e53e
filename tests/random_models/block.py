"""A kind of block of a random model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

EXACT = 1e-9
"""Tolerance for models whose arithmetic is in float64: rounding errors grow over the steps."""
ROUNDED = 2e-4
"""Tolerance for models with a part in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A kind of block: it maps (samples, positions, width) to the same shape."""

    make: Callable[[int], Sequence[nn.Module]]
    """Makes the modules of the block for a width. They are called one after the other."""
    needs_positions: bool = False
    """Whether inputs must have the dimension of positions."""
    is_random: bool = False
    """Whether the result depends on the generator of each rank, so no result is expected."""
    tolerance: float = EXACT
    """Largest relative difference to one process."""


def block(*makers: Callable[[int], nn.Module], **options: bool | float) -> Block:
    """Returns a block of one module for each of the makers."""
    return Block(make=lambda width: [make(width) for make in makers], **options)
