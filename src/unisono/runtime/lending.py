"""Which calls of a group are made by reading others' memory where it is, instead of through slots.

A slot is written once for all that read it, so lending saves most where each value has one reader.
It costs a system call for each read, and a wait for the readers at the end. Measured
(`benchmarks/single_copy.py`) on a CPU whose cores get modified lines from each other slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.types import Op

_LEAST_BYTES = 32 << 10
_MOST_CROWDED_BYTES = 4 << 20
"""With more ranks than cores: longer pieces no longer stay in the caches."""
_BLOCK_BYTES, _CROWDED_BLOCK_BYTES = 256 << 10, 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """By operation, the lengths in bytes that the longest piece of a call may have."""

    pieces: Mapping[Op, range] = field(default_factory=dict)
    block_bytes: int = _BLOCK_BYTES

    def serves(self, op: Op, longest_bytes: int) -> bool:
        """Whether a call is made so.

        >>> lending_for(2, cores=2).serves(Op.ALL_TO_ALL, 1 << 20), NO_LENDING.serves(Op.SCAN, 8)
        (True, False)
        """
        return longest_bytes in self.pieces.get(op, ())


NO_LENDING = Lending()


def lending_for(ranks: int, *, cores: int) -> Lending:
    """What suits so many ranks of one host that can read each other's memory."""
    if ranks > cores:
        served = range(_LEAST_BYTES, _MOST_CROWDED_BYTES)
        return Lending(pieces={Op.ALL_TO_ALL: served}, block_bytes=_CROWDED_BLOCK_BYTES)
    served = range(_LEAST_BYTES, 1 << 62)
    return Lending(pieces=dict.fromkeys((Op.ALL_TO_ALL, Op.ALL_GATHER, Op.REDUCE_SCATTER), served))
