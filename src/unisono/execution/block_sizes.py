"""Sizes of the blocks into which the executor divides the pieces of a call."""

from __future__ import annotations

from collections.abc import Sequence

from unisono import native
from unisono.errors import UnsupportedError

_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 32 << 10, 256 << 10
LEAST_SPANNING_BYTES, _MOST_SPANNING_BYTES = 64 << 10, 512 << 10
"""Bounds of the blocks of a call on several hosts."""
_BLOCK_UNIT_BYTES = 4096  # a multiple of every element size and of the cache line size


def block_bytes_for(
    slots: Sequence[int],
    depth: int,
    buffer_bytes: int,
    *,
    wanted: int | None = None,
    spans: bool = False,
) -> int:
    """Returns the block size in bytes: `wanted`, or a default within bounds. By default, the
    staging buffers of all ranks together fit in a third of the cache. With `spans` (ranks on
    several hosts), the default is the maximum.

    `slots` are the staging slots of each rank, `depth` the blocks in flight, `buffer_bytes` the
    staging memory of a rank for one block. Raises `UnsupportedError` for a block that does not fit
    in this memory.

    >>> block_bytes_for([4, 4, 4, 4], depth=2, buffer_bytes=1 << 17) >> 10  # a slot of four
    32
    """
    target = 0.3 * native.last_level_cache_bytes() / ((sum(slots) + len(slots)) * depth)
    power = 1 << (max(int(target), 1).bit_length() - 1)
    block = min(max(power, _LEAST_BLOCK_BYTES), _MOST_BLOCK_BYTES)
    if spans:
        block = _MOST_SPANNING_BYTES
    most = buffer_bytes // max(1, *slots)
    if most < _BLOCK_UNIT_BYTES:
        raise UnsupportedError(
            f"{max(slots)} slots need {max(slots) * _BLOCK_UNIT_BYTES} bytes of staging per rank "
            f"and block, the group has {buffer_bytes}: raise UNISONO_STAGING_BYTES"
        )
    most = most // _BLOCK_UNIT_BYTES * _BLOCK_UNIT_BYTES
    if wanted is None:
        return min(block, most)
    if wanted % _BLOCK_UNIT_BYTES or not 0 < wanted <= most:
        raise UnsupportedError(
            f"block_bytes: expected a multiple of {_BLOCK_UNIT_BYTES} up to {most} (what "
            f"UNISONO_STAGING_BYTES leaves for one of {max(slots)} slots), got {wanted}"
        )
    return wanted


def several_blocks(part_bytes: int, lead: int, least_bytes: int, most_bytes: int) -> int:
    """Returns the block size that gives a part of a piece enough blocks for the first rounds to run
    ahead of the last rounds. The bounds `least_bytes` and `most_bytes` take precedence.

    >>> several_blocks(1 << 20, 2, 64 << 10, 512 << 10) >> 10
    172
    """
    several = -(-part_bytes // (2 * lead + 2) // _BLOCK_UNIT_BYTES) * _BLOCK_UNIT_BYTES
    return min(max(several, least_bytes), most_bytes)
