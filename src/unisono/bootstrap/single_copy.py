"""Selection of the calls that run by single copy: ranks read each other's memory in place.

A staging slot is written once for all its readers. So single copy saves most if each value has
one reader. It costs a system call for each read, and a wait for the readers at the end.

The limits are measured (`benchmarks/single_copy.py`) on a CPU whose cores get modified cache lines
from each other slowly (`native.meshed_cores`). On a CPU whose cores read each other's caches as
fast as their own, single copy pays if many ranks share a core. Then a rank's data has left the
cache before its reader runs (`all_to_all` of 64 MiB with 8 ranks on 2 cores: 30 ms instead of 39
to 70).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.types import Op, SingleCopy

_LEAST_BYTES = 32 << 10
_MOST_CROWDED_BYTES = 4 << 20
"""Limit with more ranks than cores: longer pieces do not stay in the caches."""
_BLOCK_BYTES, _CROWDED_BLOCK_BYTES = 256 << 10, 4 << 20
_RANKS_OF_A_CORE, _LEAST_SHARED_BYTES = 4, 2 << 20
"""Lower limits on CPUs with fast access between caches: ranks per core, and bytes of a piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleCopyRules:
    """The calls that run by single copy: by operation, the allowed bytes of the longest piece."""

    pieces: Mapping[Op, range] = field(default_factory=dict)
    block_bytes: int = _BLOCK_BYTES

    def serves(self, op: Op, longest_bytes: int) -> bool:
        """Returns true if a call runs by single copy.

        >>> always = single_copy_for(2, cores=2, wanted=SingleCopy.ALWAYS)
        >>> always.serves(Op.ALL_TO_ALL, 1 << 20), NO_SINGLE_COPY.serves(Op.ALL_TO_ALL, 1 << 20)
        (True, False)
        """
        return longest_bytes in self.pieces.get(op, ())


NO_SINGLE_COPY = SingleCopyRules()


def single_copy_for(ranks: int, *, cores: int, wanted: SingleCopy) -> SingleCopyRules:
    """Returns the rules for `ranks` ranks of one host that can read each other's memory.

    `wanted` is ALWAYS also if cores pass cache lines slowly, and AUTO only if they do not.

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
