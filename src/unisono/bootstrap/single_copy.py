"""Which calls of a group are made by reading others' memory where it is, instead of through slots.

A slot is written once for all that read it, so lending saves most where each value has one reader.
It costs a system call for each read, and a wait for the readers at the end. Measured
(`benchmarks/single_copy.py`) on a CPU whose cores get modified lines from each other slowly
(`native.meshed_cores`). On another, whose cores read each other's caches as fast as their own, it
pays once many ranks share a core: what one has written has left the cache when the reader's turn
comes (`all_to_all` of 64 MiB with 8 ranks on 2 cores: 30 ms instead of 39 to 70).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.types import Op, SingleCopy

_LEAST_BYTES = 32 << 10
_MOST_CROWDED_BYTES = 4 << 20
"""With more ranks than cores: longer pieces no longer stay in the caches."""
_BLOCK_BYTES, _CROWDED_BLOCK_BYTES = 256 << 10, 4 << 20
_RANKS_OF_A_CORE, _LEAST_SHARED_BYTES = 4, 2 << 20
"""On CPUs whose caches are near: from so many ranks a core, and from pieces of so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleCopyRules:
    """By operation, the lengths in bytes that the longest piece of a call may have."""

    pieces: Mapping[Op, range] = field(default_factory=dict)
    block_bytes: int = _BLOCK_BYTES

    def serves(self, op: Op, longest_bytes: int) -> bool:
        """Whether a call is made so.

        >>> always = single_copy_for(2, cores=2, wanted=SingleCopy.ALWAYS)
        >>> always.serves(Op.ALL_TO_ALL, 1 << 20), NO_SINGLE_COPY.serves(Op.ALL_TO_ALL, 1 << 20)
        (True, False)
        """
        return longest_bytes in self.pieces.get(op, ())


NO_SINGLE_COPY = SingleCopyRules()


def single_copy_for(ranks: int, *, cores: int, wanted: SingleCopy) -> SingleCopyRules:
    """Chooses for so many ranks of one host that can read each other's memory.

    `wanted` is ALWAYS where cores pass lines slowly, too, and AUTO only where they do not.

    >>> single_copy_for(4, cores=2, wanted=SingleCopy.AUTO) == NO_SINGLE_COPY
    True
    >>> crowd = single_copy_for(8, cores=2, wanted=SingleCopy.AUTO)
    >>> crowd.serves(Op.ALL_TO_ALL, 1 << 20), crowd.serves(Op.ALL_TO_ALL, 8 << 20)
    (False, True)
    """
    if wanted is SingleCopy.NEVER:
        return NO_SINGLE_COPY
    if wanted is SingleCopy.AUTO:
        if ranks < _RANKS_OF_A_CORE * cores:
            return NO_SINGLE_COPY
        served = range(_LEAST_SHARED_BYTES, 1 << 62)
        return SingleCopyRules(pieces={Op.ALL_TO_ALL: served}, block_bytes=_CROWDED_BLOCK_BYTES)
    if ranks > cores:
        served = range(_LEAST_BYTES, _MOST_CROWDED_BYTES)
        return SingleCopyRules(pieces={Op.ALL_TO_ALL: served}, block_bytes=_CROWDED_BLOCK_BYTES)
    served = range(_LEAST_BYTES, 1 << 62)
    return SingleCopyRules(
        pieces=dict.fromkeys((Op.ALL_TO_ALL, Op.ALL_GATHER, Op.REDUCE_SCATTER), served)
    )
