"""A plan: the flat program of one rank, interpreted once per block by the executors.

The layout of readers is that of `csrc/execution/plan.h`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unisono.schedule.record import Record, Records, Table

_READER = struct.Struct("<IHH")

READER_BYTES = _READER.size


class Reader(NamedTuple):
    """The own slot `slot`, visible from the own post `post` on, is read by another rank `rank`."""

    post: int
    slot: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """What one rank does in each block.

    `records` may be given as any sequence; it is kept as numbers and reads as a sequence.
    `stages` and the schedule's number of `rounds` are equal on all ranks, and the last record of
    every plan is POST `stages`.
    `reduce_depth` is the largest number of nested reductions in any value of any rank: above one,
    sums of 16-bit floats would be rounded more than once. `uniform` says that the pieces must
    all have one length, since this rank relays pieces whose length it cannot know. `in_place`
    says that the input and the output may be the same memory. `readers` says for each post which
    of the own slots it shows to which other ranks, in ascending order. `addresses_only` says that
    the slots of all ranks hold addresses of memory, and none holds data.
    """

    rank: int
    ranks: int
    records: Sequence[Record]
    num_slots: int
    num_tmp: int
    parts: int
    stages: int
    reduce_depth: int
    rounds: int = 1
    uniform: bool = False
    in_place: bool = True
    readers: tuple[Reader, ...] = ()
    addresses_only: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", Records.of(self.records))

    @property
    def table(self) -> Table:
        """All records as rows of `record.ROW`."""
        assert isinstance(self.records, Records)
        return self.records.table

    def pack(self) -> bytes:
        """All records, back to back.

        >>> from unisono.schedule import Code, ExecutionPlan, Record
        >>> post = Record(code=Code.POST, value=1)
        >>> plan = ExecutionPlan(rank=0, ranks=1, records=(post,), num_slots=0, num_tmp=0, parts=1,
        ...             stages=1, reduce_depth=0)
        >>> len(plan.pack())
        48
        """
        return self.table.tobytes()

    def pack_readers(self) -> bytes:
        """All readers, back to back, as `csrc/execution/plan.h` reads them.

        Each is little-endian, without gaps: the post in 32 bits, the slot in 16, the rank in 16.

        >>> plan = ExecutionPlan(
        ...     rank=0, ranks=3, records=(), num_slots=1, num_tmp=0, parts=1, stages=2,
        ...             reduce_depth=0, readers=(Reader(post=1, slot=0, rank=2),))
        >>> plan.pack_readers().hex(" ", 2)
        '0100 0000 0000 0200'
        """
        return b"".join(_READER.pack(*reader) for reader in self.readers)
