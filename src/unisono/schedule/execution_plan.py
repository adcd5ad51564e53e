"""Execution plan: the sequence of records of one rank, which the executors interpret once per
block.

The layout of readers is also defined in `csrc/execution/plan.h`.
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
    """Another rank that reads a staging slot of the rank that runs this plan. Rank `rank` reads
    slot `slot` after post `post` of this plan.
    """

    post: int
    slot: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """Records that one rank runs once per block, and properties of the plan.

    - `records` may be any sequence. The plan stores the records as numbers and presents them as a
      sequence.
    - `stages` is the value of the POST record that ends every plan. `stages` and `rounds` (the
      schedule's number of rounds) are equal on all ranks.
    - `reduce_depth` is the largest number of nested reductions in any value of any rank. If the
      depth is above one, sums of 16-bit floats would be rounded more than once.
    - `uniform` is true if all pieces must have the same length, because this rank forwards pieces
      of unknown length.
    - `in_place` is true if the input and the output may be the same memory.
    - `readers` lists the readers of this rank's slots, in ascending order.
    - `addresses_only` is true if every slot of every rank holds the address of shared memory, not
      data.
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
        """The records as rows of `record.ROW`."""
        assert isinstance(self.records, Records)
        return self.records.table

    def pack(self) -> bytes:
        """Returns all records as contiguous bytes.

        >>> from unisono.schedule import Code, ExecutionPlan, Record
        >>> post = Record(code=Code.POST, value=1)
        >>> plan = ExecutionPlan(rank=0, ranks=1, records=(post,), num_slots=0, num_tmp=0, parts=1,
        ...             stages=1, reduce_depth=0)
        >>> len(plan.pack())
        48
        """
        return self.table.tobytes()

    def pack_readers(self) -> bytes:
        """Returns all readers as contiguous bytes, in the layout of `csrc/execution/plan.h`.

        Each reader is little-endian, without gaps: the post in 32 bits, the slot in 16, the rank in
        16.

        >>> plan = ExecutionPlan(
        ...     rank=0, ranks=3, records=(), num_slots=1, num_tmp=0, parts=1, stages=2,
        ...             reduce_depth=0, readers=(Reader(post=1, slot=0, rank=2),))
        >>> plan.pack_readers().hex(" ", 2)
        '0100 0000 0000 0200'
        """
        return b"".join(_READER.pack(*reader) for reader in self.readers)
