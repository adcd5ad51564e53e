"""Tests of the limit that consists of the kernels alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import native
from unisono.bench.cases import Case
from unisono.bench.peers.kernels import KernelsPeer
from unisono.errors import UnisonoError


@given(
    parts=st.integers(1, 9), count=st.integers(0, 3000), skip=st.integers(0, 20), far=st.booleans()
)
def test_parts_are_summed(parts: int, count: int, skip: int, far: bool) -> None:
    source = np.arange(skip + parts * count, dtype=np.float32)[skip:]
    target = np.full(count + 2, -1, np.float32)
    native.sum_parts(target[1:].ctypes.data, source.ctypes.data, parts, count, far)
    assert np.array_equal(target[1:-1], source.reshape(parts, count).sum(0))
    assert target[0] == target[-1] == -1


@pytest.mark.parametrize("parts", [0, 65])
def test_a_number_of_parts_out_of_range_is_refused(parts: int) -> None:
    memory = np.zeros(100, np.float32).ctypes.data
    with pytest.raises(UnisonoError, match=rf"1\.\.64 parts, got {parts}"):
        native.sum_parts(memory, memory, parts, 1, False)


@given(count=st.integers(0, 20_000), skip=st.integers(0, 70), streaming=st.booleans())
def test_memory_is_copied(count: int, skip: int, streaming: bool) -> None:
    source = (np.arange(skip + count) % 251).astype(np.uint8)[skip:]
    target = np.full(count + 2, 255, np.uint8)
    native.copy_memory(target[1:].ctypes.data, source.ctypes.data, count, streaming)
    assert np.array_equal(target[1:-1], source)
    assert target[0] == target[-1] == 255


@pytest.mark.parametrize(
    ("op", "rank", "read", "written", "rewritten"),
    [
        ("all_reduce", 1, 4096, 4096, 4096),
        ("all_gather", 1, 4096, 4096, 1024),
        ("all_to_all", 0, 4096, 4096, 4096),
        ("broadcast", 1, 4096, 4096, 4096),
        ("broadcast", 0, 0, 0, 4096),
        ("reduce_scatter", 3, 4096, 1024, 4096),
    ],
)
def test_the_limit_accesses_the_bytes_of_the_operation(
    op: str, rank: int, read: int, written: int, rewritten: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [0, 0]

    def copy_memory(dst: int, src: int, nbytes: int, streaming: bool) -> None:
        found[:] = [nbytes, nbytes]

    def sum_parts(dst: int, src: int, parts: int, count: int, streaming: bool) -> None:
        found[:] = [4 * parts * count, 4 * count]

    monkeypatch.setattr(native, "copy_memory", copy_memory)
    monkeypatch.setattr(native, "sum_parts", sum_parts)
    peer: Any = KernelsPeer(rank=rank, streaming=False)
    none = np.empty(0, np.float32)
    peer.bind(Case(op=op, ranks=4, nbytes=4096), none, none)()
    assert found == [read, written]
    assert peer._input.nbytes == rewritten
    peer._input.fill(5)
    peer.rewrite(none)
    assert not peer._input.any()
