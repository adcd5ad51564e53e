"""A plan: the flat program of one rank, interpreted once per block by the executors.

The layout of records and references is that of `csrc/plan.h`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple

_REF = struct.Struct("<BxHHH")
_HEAD = struct.Struct("<HHHHIHH")
_READER = struct.Struct("<IHH")

REF_BYTES = _REF.size
RECORD_BYTES = _HEAD.size + 4 * REF_BYTES
READER_BYTES = _READER.size


class Space(IntEnum):
    """Where a reference points."""

    IN = 0
    OUT = 1
    SLOT = 2
    TMP = 3


class Code(IntEnum):
    """What a record does."""

    COPY = 0
    REDUCE = 1
    ARG = 2
    WAIT = 3
    POST = 4


class Flag(IntFlag):
    """Modifiers of a record."""

    NONE = 0
    HAS_DST2 = 1
    FINAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """One part of a piece (IN, OUT), a staging slot of any rank, or private memory."""

    space: Space = Space.IN
    rank: int = 0
    index: int = 0
    part: int = 0

    def pack(self) -> bytes:
        """The eight bytes the executor reads."""
        return _REF.pack(self.space, self.rank, self.index, self.part)


NO_REF = Ref()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One instruction.

    COPY: `dst` (and `dst2` with HAS_DST2) <- `src`. REDUCE: `dst` (and `dst2`) <- the fold, left
    to right, of the `src` of the `nsrc` ARG records that follow; FINAL says that the result holds
    all contributions. WAIT: until the peer's progress reaches block base + `value`. POST: own
    progress becomes block base + `value`. The bytes moved are those of the part `length`.
    """

    code: Code
    nsrc: int = 0
    peer: int = 0
    flags: Flag = Flag.NONE
    value: int = 0
    dst: Ref = NO_REF
    dst2: Ref = NO_REF
    src: Ref = NO_REF
    length: Ref = NO_REF
    round: int = 0
    posted: int = 0

    def pack(self) -> bytes:
        """The 48 bytes the executor reads."""
        head = _HEAD.pack(self.code, self.nsrc, self.peer, self.flags, self.value, self.round, self.posted)
        refs = (self.dst, self.dst2, self.src, self.length)
        return head + b"".join(ref.pack() for ref in refs)


class Reader(NamedTuple):
    """The own slot `slot`, visible from the own post `post` on, is read by another rank `rank`."""

    post: int
    slot: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one rank does in each block.

    `stages` is equal on all ranks, and the last record of every plan is POST `stages`.
    `reduce_depth` is the largest number of nested reductions in any value of any rank: above one,
    sums of 16-bit floats would be rounded more than once. `uniform` says that the pieces must
    all have one length, since this rank relays pieces whose length it cannot know. `in_place`
    says that the input and the output may be the same memory. `readers` says for each post which
    of the own slots it shows to which other ranks, in ascending order.
    """

    rank: int
    ranks: int
    records: tuple[Record, ...]
    num_slots: int
    num_tmp: int
    parts: int
    stages: int
    reduce_depth: int
    rounds: int = 1
    uniform: bool = False
    in_place: bool = True
    readers: tuple[Reader, ...] = ()

    def pack(self) -> bytes:
        """All records, back to back.

        >>> post = Record(code=Code.POST, value=1)
        >>> plan = Plan(rank=0, ranks=1, records=(post,), num_slots=0, num_tmp=0, parts=1,
        ...             stages=1, reduce_depth=0)
        >>> len(plan.pack())
        48
        """
        return b"".join(record.pack() for record in self.records)

    def pack_readers(self) -> bytes:
        """All readers, back to back, as `csrc/plan.h` reads them: little-endian, without gaps, the
        post in 32 bits, the slot in 16, the rank in 16.

        >>> plan = Plan(rank=0, ranks=3, records=(), num_slots=1, num_tmp=0, parts=1, stages=2,
        ...             reduce_depth=0, readers=(Reader(post=1, slot=0, rank=2),))
        >>> plan.pack_readers().hex(" ", 2)
        '0100 0000 0000 0200'
        """
        return b"".join(_READER.pack(*reader) for reader in self.readers)
