"""The plan has the memory layout that `csrc/execution/plan.h` reads."""

from __future__ import annotations

import struct

from unisono.algorithms import build
from unisono.schedule import RECORD_BYTES, REF_BYTES, Code, Flag, Record, Ref, Space, lower


def test_a_reference_has_the_layout_of_the_executor() -> None:
    packed = Ref(space=Space.SLOT, rank=0x0102, index=0x0304, part=0x0506).pack()
    assert packed == bytes([2, 0, 2, 1, 4, 3, 6, 5])
    assert REF_BYTES == 8


def test_a_record_has_the_layout_of_the_executor() -> None:
    record = Record(
        code=Code.REDUCE,
        nsrc=3,
        peer=7,
        flags=Flag.HAS_DST2 | Flag.FINAL,
        value=0x01020304,
        dst=Ref(space=Space.OUT, index=1),
        dst2=Ref(space=Space.SLOT, index=2),
        src=Ref(space=Space.TMP, index=3),
        length=Ref(space=Space.IN, index=4, part=5),
    )
    packed = record.pack()
    assert len(packed) == RECORD_BYTES == 48
    assert struct.unpack_from("<HHHHII", packed) == (1, 3, 7, 3, 0x01020304, 0)
    refs = [struct.unpack_from("<BxHHH", packed, 16 + 8 * i) for i in range(4)]
    assert refs == [(1, 0, 1, 0), (2, 0, 2, 0), (3, 0, 3, 0), (0, 0, 4, 5)]


def test_codes_match_the_executor() -> None:
    assert [c.name for c in sorted(Code)] == ["COPY", "REDUCE", "ARG", "WAIT", "POST", "SHARE"]
    assert [s.name for s in sorted(Space)] == ["IN", "OUT", "SLOT", "TMP", "SHARED"]


def test_a_packed_plan_is_its_contiguous_records() -> None:
    plan = lower(build("all_reduce", "direct", ranks=3))[1]
    packed = plan.pack()
    assert len(packed) == 48 * len(plan.records)
    assert packed[48:96] == plan.records[1].pack()
