"""The builder accepts numbers and arrays, and keeps the order of added transfers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import ScheduleError
from unisono.schedule import Builder, Collective
from unisono.types import Op


def builder() -> Builder:
    return Builder(Collective(op=Op.ALL_REDUCE, ranks=9, parts=9), "test")


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans(), st.integers(0, 2))))
def test_arrays_equal_their_elements_added_one_by_one(
    calls: list[tuple[int, bool, bool, int]],
) -> None:
    one_by_one, at_once = builder(), builder()
    for size, reduce, as_array, number in calls:
        one_by_one.round = at_once.round = number
        src = np.arange(size)
        single = one_by_one.reduce if reduce else one_by_one.copy
        for i in range(size):
            single(i, 3, i + 1, 8 - i, count=i + 1, channel=2)
        add = at_once.reduce if reduce else at_once.copy
        if as_array:
            add(src, 3, src + 1, 8 - src, count=src + 1, channel=2)
        else:
            for i in range(size):
                add(np.int64(i) if i % 2 else i, 3, i + 1, 8 - i, count=i + 1, channel=2)
    assert one_by_one.build() == at_once.build()
    assert one_by_one.build().transfers == at_once.build().transfers


def test_arrays_are_broadcast_and_copied() -> None:
    b = builder()
    src = np.arange(2)
    b.copy(src[:, None], 1, np.array([4, 5, 6]))
    src[:] = 7
    found = [(t.src, t.src_chunk, t.dst, t.dst_chunk) for t in b.build().transfers]
    assert found == [(s, 1, d, 1) for s in (0, 1) for d in (4, 5, 6)]


def test_a_builder_accepts_transfers_after_build() -> None:
    b = builder()
    b.copy(0, 0, 1)
    first = b.build()
    b.copy(0, 0, np.array([2]))
    assert [t.dst for t in first.transfers] == [1]
    assert [t.dst for t in b.build().transfers] == [1, 2]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((np.arange(2), 0, np.arange(3)), "round 0: .*broadcast"),
        ((np.ones(2), 0, 1), "round 0, src: expected integers, got "),
        ((0, 0.5, 1), "round 0, src_chunk: expected integers, got 0.5"),
        ((0, 1 << 40, 1), "src_chunk: expected integers of 32 bits"),
        ((0, 1 << 80, 1), "numbers of at most 32 bits"),
        ((0, np.array([1 << 40]), 1), "src_chunk: expected integers of 32 bits"),
    ],
)
def test_invalid_transfers_are_rejected(args: tuple[Any, Any, Any], text: str) -> None:
    b = builder()
    with pytest.raises(ScheduleError, match=text):
        b.copy(*args)
        b.build()
