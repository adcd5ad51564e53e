"""Definition of a collective: the chunks that each rank holds before the call, and must hold after
the call.

A collective consists of *logical chunks*. A rank has one location for each chunk, so a schedule can
say "chunk 3 of rank 2". `input_ref` and `output_ref` map a chunk to the caller's buffers. The
buffers of a rank are lists of *pieces*, and each piece is cut into `parts` parts.

| operation                    | chunk                           | input pieces   | output pieces  |
|------------------------------|---------------------------------|----------------|----------------|
| all_reduce, broadcast, reduce| part                            | 1              | 1              |
| scan, exscan                 | part                            | 1              | 1              |
| all_gather, gather           | owner * parts + part            | 1              | n (by owner)   |
| reduce_scatter, scatter      | dest * parts + part             | n (by dest)    | 1              |
| all_to_all                   | (src * n + dst) * parts + part  | n (by dest)    | n (by source)  |
| barrier                      | none                            | 0              | 0              |

In operations with a root, only the root has the n pieces. A finished chunk contains the
contributions of all ranks that hold the chunk before the call. Scan and exscan differ: rank r gets
the contributions of ranks 0..r (scan) or 0..r-1 (exscan). Exscan does not change the output of rank
0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError
from unisono.types import Op

_BY_PART = (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE, Op.SCAN, Op.EXSCAN)
_BY_OWNER = (Op.ALL_GATHER, Op.GATHER)
_BY_DEST = (Op.REDUCE_SCATTER, Op.SCATTER)

Numbers: TypeAlias = NDArray[np.int64]
Chunk = TypeVar("Chunk", int, Numbers)

MAX_RANKS = 1 << 16
"""Largest number of ranks, pieces and parts, because plans store them in 16-bit fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Precondition and postcondition of an operation, over the chunks of `ranks` ranks.

    Raises `ScheduleError` for numbers out of range and for a missing, wrong or superfluous root.

    >>> c = Collective(op=Op.ALL_GATHER, ranks=3)
    >>> c.initial(1), c.expected(1)
    (range(1, 2), {0: frozenset({0}), 1: frozenset({1}), 2: frozenset({2})})
    """

    op: Op
    ranks: int
    parts: int = 1
    root: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ScheduleError(f"{self.op}: expected 1..{MAX_RANKS} ranks, got {self.ranks}")
        if not 1 <= self.parts <= MAX_RANKS:
            raise ScheduleError(f"{self.op}: expected 1..{MAX_RANKS} parts, got {self.parts}")
        if self.op.rooted and (self.root is None or not 0 <= self.root < self.ranks):
            raise ScheduleError(
                f"{self.op}: expected a root in 0..{self.ranks - 1}, got {self.root}"
            )
        if not self.op.rooted and self.root is not None:
            raise ScheduleError(f"{self.op}: expected no root, got {self.root}")

    @property
    def num_chunks(self) -> int:
        """Number of logical chunks."""
        if self.op is Op.BARRIER:
            return 0
        if self.op in _BY_PART:
            return self.parts
        if self.op is Op.ALL_TO_ALL:
            return self.ranks * self.ranks * self.parts
        return self.ranks * self.parts

    @overload
    def holds(self, rank: int, chunk: int) -> bool: ...
    @overload
    def holds(self, rank: Numbers, chunk: Numbers) -> NDArray[np.bool_]: ...
    def holds(self, rank: Any, chunk: Any) -> Any:
        """Returns true if the rank's input has a contribution to the chunk. Accepts arrays, too."""
        if self.op.reduces:
            return chunk >= 0
        if self.op in (Op.BROADCAST, Op.SCATTER):
            return rank == self.root
        if self.op is Op.ALL_TO_ALL:
            return rank == chunk // (self.ranks * self.parts)
        return rank == chunk // self.parts

    @overload
    def wants(self, rank: int, chunk: int) -> bool: ...
    @overload
    def wants(self, rank: Numbers, chunk: Numbers) -> NDArray[np.bool_]: ...
    def wants(self, rank: Any, chunk: Any) -> Any:
        """Returns true if the rank's output must hold the chunk at the end. Accepts arrays, too."""
        if self.op in (Op.ALL_REDUCE, Op.BROADCAST, Op.ALL_GATHER, Op.SCAN):
            return chunk >= 0
        if self.op is Op.EXSCAN:
            return rank > 0
        if self.op in (Op.REDUCE, Op.GATHER):
            return rank == self.root
        if self.op is Op.ALL_TO_ALL:
            return rank == chunk // self.parts % self.ranks
        return rank == chunk // self.parts

    def summands(self, rank: int) -> range:
        """Returns the ranks whose contributions are combined in the rank's output. Valid only for
        operations that reduce.
        """
        if self.op is Op.SCAN:
            return range(rank + 1)
        return range(rank if self.op is Op.EXSCAN else self.ranks)

    def contributors(self, rank: int, chunk: int) -> frozenset[int]:
        """Returns the ranks whose contributions must be in this chunk of the rank's output."""
        if self.op.reduces:
            return frozenset(self.summands(rank))
        if self.op in (Op.BROADCAST, Op.SCATTER):
            assert self.root is not None
            return frozenset((self.root,))
        if self.op is Op.ALL_TO_ALL:
            return frozenset((chunk // (self.ranks * self.parts),))
        return frozenset((chunk // self.parts,))

    def initial(self, rank: int) -> Sequence[int]:
        """Returns the chunks that the rank holds before the call. These chunks contain only the
        rank's own contributions. See `holds`.
        """
        if self.op.reduces or (rank == self.root and self.op is not Op.GATHER):
            return range(self.num_chunks)
        if self.op in (Op.BROADCAST, Op.SCATTER):
            return ()
        each = self.num_chunks // self.ranks
        return range(rank * each, (rank + 1) * each)

    def wanted(self, rank: int) -> Sequence[int]:
        """Returns the chunks that the rank must hold after the call. See `wants`."""
        if self.op in (Op.REDUCE_SCATTER, Op.SCATTER):
            return range(rank * self.parts, (rank + 1) * self.parts)
        if self.op is Op.ALL_TO_ALL:
            starts = range(rank * self.parts, self.num_chunks, self.ranks * self.parts)
            return [start + part for start in starts for part in range(self.parts)]
        if (self.op in (Op.REDUCE, Op.GATHER) and rank != self.root) or (
            self.op is Op.EXSCAN and rank == 0
        ):
            return ()
        return range(self.num_chunks)

    def expected(self, rank: int) -> dict[int, frozenset[int]]:
        """Returns the chunks that the rank must hold after the call, each with its contributors."""
        return {chunk: self.contributors(rank, chunk) for chunk in self.wanted(rank)}

    def input_ref(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Returns (piece, part) of the rank's contribution in its input, or None if the rank has no
        contribution.

        >>> Collective(op=Op.REDUCE_SCATTER, ranks=4, parts=2).input_ref(0, 5)
        (2, 1)
        """
        if not self.holds(rank, chunk):
            return None
        return self.input_piece(chunk), chunk % self.parts

    def output_ref(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Returns (piece, part) of the finished chunk in the rank's output, or None if the output
        does not contain the chunk.
        """
        if not self.wants(rank, chunk):
            return None
        return self.output_piece(chunk), chunk % self.parts

    def input_piece(self, chunk: Chunk) -> Chunk:
        """Returns the input piece that contains the chunk. Accepts an array of chunks, too."""
        piece = chunk // self.parts
        if self.op in _BY_DEST:
            return piece
        return piece % self.ranks if self.op is Op.ALL_TO_ALL else chunk * 0

    def output_piece(self, chunk: Chunk) -> Chunk:
        """Returns the output piece that contains the chunk. Accepts an array of chunks, too."""
        piece = chunk // self.parts
        if self.op in _BY_OWNER:
            return piece
        return piece // self.ranks if self.op is Op.ALL_TO_ALL else chunk * 0

    def input_pieces(self, rank: int) -> int:
        """Returns the number of input pieces of the rank."""
        if self.op is Op.BARRIER:
            return 0
        if self.op is Op.SCATTER:
            return self.ranks if rank == self.root else 0
        return self.ranks if self.op in (Op.REDUCE_SCATTER, Op.ALL_TO_ALL) else 1

    def output_pieces(self, rank: int) -> int:
        """Returns the number of output pieces of the rank."""
        if self.op is Op.BARRIER:
            return 0
        if self.op is Op.GATHER:
            return self.ranks if rank == self.root else 0
        return self.ranks if self.op in (Op.ALL_GATHER, Op.ALL_TO_ALL) else 1

    def in_place_output(self, rank: int, piece: int) -> int | None:
        """Returns the output piece at the address of this input piece in an in-place call, or
        None.
        """
        if self.op in _BY_OWNER:
            return rank if self.output_pieces(rank) else None
        if self.op in _BY_DEST:
            return 0 if piece == rank else None
        return piece
