"""Rules that determine which calls of a group use single copy instead of slots.

With single copy, a reader copies straight from the owner's memory. A slot is written once for all
its readers, so single copy saves most where each value has one reader. Its cost is one system call
for each read, and a wait for the readers at the end.

The limits were measured (`benchmarks/single_copy.py`) on a CPU whose cores pass modified cache
lines slowly (`native.meshed_cores`). On a CPU whose cores read each other's caches as fast as their
own, single copy pays only if ranks share a core. In that case, written data has left the cache when
the reader runs. An `all_to_all` of 64 MiB takes 30 ms instead of 39 to 70 with 8 ranks on 2 cores;
with 4 ranks, it takes 11 instead of 15 if the cores are far apart, and 15.5 in both cases if not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.types import Op, SingleCopy

_LEAST_BYTES = 32 << 10
_MOST_CROWDED_BYTES = 4 << 20
"""Longest part in bytes that still fits in the caches, with more ranks than cores."""
_BLOCK_BYTES, _CROWDED_BLOCK_BYTES = 256 << 10, 4 << 20
_RANKS_OF_A_CORE, _LEAST_SHARED_BYTES = 2, 2 << 20
"""Minimum ranks per core and minimum bytes per part for single copy, on CPUs with fast shared
caches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleCopyRules:
    """Ranges of piece lengths in bytes, by operation. A call uses single copy if its longest piece
    is in the range of its operation.
    """

    pieces: Mapping[Op, range] = field(default_factory=dict)
    block_bytes: int = _BLOCK_BYTES

    def serves(self, op: Op, longest_bytes: int) -> bool:
        """Returns True if a call uses single copy.

        >>> always = single_copy_for(2, cores=2, wanted=SingleCopy.ALWAYS)
        >>> always.serves(Op.ALL_TO_ALL, 1 << 20), NO_SINGLE_COPY.serves(Op.ALL_TO_ALL, 1 << 20)
        (True, False)
        """
        return longest_bytes in self.pieces.get(op, ())


NO_SINGLE_COPY = SingleCopyRules()


def single_copy_for(ranks: int, *, cores: int, wanted: SingleCopy) -> SingleCopyRules:
    """Chooses the rules for `ranks` ranks of one host that can read each other's memory.

    On a CPU whose cores pass modified cache lines slowly, pass ALWAYS instead of AUTO.

    >>> single_copy_for(3, cores=2, wanted=SingleCopy.AUTO) == NO_SINGLE_COPY
    True
    >>> crowd = single_copy_for(4, cores=2, wanted=SingleCopy.AUTO)
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
