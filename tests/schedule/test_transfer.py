"""Columns hold the same values as transfer objects, are read-only, and do not truncate numbers."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import ScheduleError
from unisono.schedule import Columns, Transfer, Transfers
from unisono.schedule.transfer import FIELDS

numbers = st.integers(-(1 << 31), (1 << 31) - 1)
rows = st.lists(
    st.builds(
        Transfer,
        round=numbers,
        src=numbers,
        src_chunk=numbers,
        dst=numbers,
        dst_chunk=numbers,
        count=numbers,
        reduce=st.booleans(),
        channel=numbers,
    ),
    max_size=5,
)


@given(rows)
def test_columns_equal_their_source_objects(expected: list[Transfer]) -> None:
    transfers = Transfers.of(expected)
    assert list(transfers) == expected == [transfers[i] for i in range(len(expected))]
    assert list(transfers[1:]) == expected[1:] and list(transfers[::-1]) == expected[::-1]
    assert list(transfers[:2] + expected[2:]) == expected
    assert transfers == Transfers.of(expected) and hash(transfers) == hash(Transfers.of(expected))
    assert (transfers == Transfers.of([*expected, *expected])) is (not expected)
    for again in (pickle.loads(pickle.dumps(transfers)), copy.deepcopy(transfers)):
        assert again == transfers
        assert not any(array.flags.writeable for array in again.columns.arrays())
    if expected:
        assert transfers[-1] == expected[-1] and expected[0] in transfers
        assert all(type(getattr(transfers[0], name)) is not np.int32 for name in FIELDS)


def test_columns_are_read_only_and_independent_of_their_source() -> None:
    source = np.arange(3)
    columns = Columns.of(source, source, source, source, source, source, source > 0, source)
    source[:] = 7
    assert columns.src.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        columns.src[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        columns.select(slice(1, None)).dst[0] = 1


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([1 << 31], r"dst: expected integers of 32 bits, got int64 2147483648\.\.2147483648"),
        ([-(1 << 31) - 1], "dst: expected integers of 32 bits"),
        ([1 << 80], "dst: expected integers of 32 bits"),
        ([0.5], "dst: expected integers of 32 bits"),
        ([1, 2], r"dst: expected 1 numbers in a row, got \(2,\)"),
        ([[1]], r"dst: expected 1 numbers in a row, got \(1, 1\)"),
    ],
)
def test_numbers_beyond_32_bits_are_rejected(bad: list[int], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        Columns.of([0], [0], [0], bad, [0], [1], [False], [0])


def test_the_repr_of_a_long_list_is_cut() -> None:
    one = Transfer(round=0, src=0, src_chunk=0, dst=1, dst_chunk=0)
    assert repr(Transfers.of([one])) == f"Transfers([{one!r}])"
    assert repr(Transfers.of([one] * 99)).endswith("... 91 more])")
