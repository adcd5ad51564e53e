"""Records, which are the instructions of an execution plan, and their storage as columns of
numbers.

The layout of records and references is also defined in `csrc/execution/plan.h`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, SupportsIndex, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

Table: TypeAlias = NDArray[np.void]
"""Array of records, with `ROW` as its type."""

_REF = struct.Struct("<BxHHH")
_HEAD = struct.Struct("<HHHHIHH")
_READ_AT_ONCE = 1 << 14

REF_BYTES = _REF.size
RECORD_BYTES = _HEAD.size + 4 * REF_BYTES
ROW = np.dtype(
    [(name, "<u2") for name in ("code", "nsrc", "peer", "flags")]
    + [("value", "<u4")]
    + [(name, "<u2") for name in ("round", "posted")]
    + [(name, "<u8") for name in ("dst", "dst2", "src", "length")]
)
"""NumPy type of a record. `words` encodes the references."""


class Space(IntEnum):
    """Memory that a reference points to."""

    IN = 0
    OUT = 1
    SLOT = 2
    TMP = 3
    SHARED = 4


class Code(IntEnum):
    """Action of a record."""

    COPY = 0
    REDUCE = 1
    ARG = 2
    WAIT = 3
    POST = 4
    SHARE = 5


class Flag(IntFlag):
    """Modifiers of a record."""

    NONE = 0
    HAS_DST2 = 1
    FINAL = 2
    SHARES = 4
    WRITES_BACK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A reference to a part of a piece (IN, OUT), to a staging slot of any rank (SLOT), to private
    memory (TMP), or to memory of another rank that is read in place (SHARED). For SHARED, slot
    `index` of the other rank contains the address.
    """

    space: Space = Space.IN
    rank: int = 0
    index: int = 0
    part: int = 0

    def pack(self) -> bytes:
        """Returns the eight bytes that the executor reads."""
        return _REF.pack(self.space, self.rank, self.index, self.part)

    @classmethod
    def of(cls, word: int) -> Ref:
        """Returns the reference that this number encodes. See `words`."""
        rank, index, part = (word >> shift & 0xFFFF for shift in (16, 32, 48))
        return cls(space=Space(word & 0xFF), rank=rank, index=index, part=part)


def words(space: Space, rank: Any, index: Any, part: Any = 0) -> Any:
    """Encodes references as 64-bit integers, whose eight little-endian bytes are the result of
    `Ref.pack`.

    >>> Ref.of(words(Space.TMP, np.array([1, 2]), 5)[1].item())
    Ref(space=<Space.TMP: 3>, rank=2, index=5, part=0)
    """
    return int(space) | rank << 16 | index << 32 | part << 48


NO_REF = Ref()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One instruction of an execution plan.

    - COPY: copies `src` to `dst`, and to `dst2` with HAS_DST2.
    - REDUCE: folds the `src` of the `nsrc` following ARG records, from left to right, into `dst`
      (and `dst2`). The flag FINAL means that the result contains all contributions.
    - SHARE: writes the address of `src` to the slot `dst`, so that other ranks can read `src` in
      place.
    - WAIT: waits until the peer's progress reaches block base + `value`.
    - POST: sets the rank's own progress to block base + `value`.

    The flag SHARES means that `dst2` is a slot for the address of `dst`. The flag WRITES_BACK of a
    REDUCE means that the result is also written to the memory of every SHARED operand. The same
    flag of a SHARE means that the reader of `src` writes to it in this way. `length` refers to a
    part of a piece. The size of this part is the number of bytes to move. `round` is the schedule's
    round, counted without gaps. For a WAIT, `posted` is the round of the peer's post.
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
        """Returns the 48 bytes that the executor reads."""
        head = _HEAD.pack(
            self.code, self.nsrc, self.peer, self.flags, self.value, self.round, self.posted
        )
        refs = (self.dst, self.dst2, self.src, self.length)
        return head + b"".join(ref.pack() for ref in refs)


class Records(Sequence[Record]):
    """Rows of numbers as a sequence of `Record`. Access creates each `Record`.

    >>> records = Records.of([Record(code=Code.WAIT, peer=1, value=2), Record(code=Code.POST)])
    >>> records[0].peer, len(records), records.table["value"]
    (1, 2, array([2, 0], dtype=uint32))
    """

    __slots__ = ("table",)

    def __init__(self, table: Table) -> None:
        table.setflags(write=False)
        self.table = table

    @classmethod
    def of(cls, records: Iterable[Record]) -> Records:
        """Converts records to rows of numbers."""
        if isinstance(records, Records):
            return records
        return cls(np.frombuffer(b"".join(record.pack() for record in records), ROW))

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Record | Records:
        if isinstance(index, slice):
            return Records(self.table[index])
        return _record(self.table[index].item())

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), _READ_AT_ONCE):
            yield from map(_record, self.table[start : start + _READ_AT_ONCE].tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Records):
            return NotImplemented
        return np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        return hash(self.table.tobytes())

    def __repr__(self) -> str:
        return f"Records({list(self)})"


def _record(row: tuple[int, ...]) -> Record:
    code, nsrc, peer, flags, value, round_, posted, *refs = row
    dst, dst2, src, length = map(Ref.of, refs)
    return Record(
        code=Code(code),
        nsrc=nsrc,
        peer=peer,
        flags=Flag(flags),
        value=value,
        dst=dst,
        dst2=dst2,
        src=src,
        length=length,
        round=round_,
        posted=posted,
    )
