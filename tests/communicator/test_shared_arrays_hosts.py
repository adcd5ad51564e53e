"""Collectives on shared arrays of ranks on several hosts.

Ranks of one host read each other's arrays in place. Results have the bits of those on ordinary
arrays.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from communicator.test_shared_arrays import numbers, results
from pretended_hosts import World, check_all, run
from unisono import Communicator, MismatchError
from unisono.types import Op

ENOUGH = 20_000
"""Elements of a call that uses shared arrays with more ranks than cores."""


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_bits_are_those_of_ordinary_arrays(worlds: list[World], data: st.DataObject) -> None:
    world, op = data.draw(st.sampled_from(worlds)), data.draw(st.sampled_from(list(Op)))
    dtype = data.draw(st.sampled_from(["float32", "int64", "float16"]))
    count = data.draw(st.sampled_from([1, 5000, ENOUGH, 150_001]))
    seed = data.draw(st.integers(0, 9))

    def body(comm: Communicator) -> None:
        x = numbers(dtype, comm.rank, count, seed)

        def shared(count: int) -> NDArray[Any]:
            return comm.empty(count, dtype)

        expected = results(comm, op, lambda count: np.empty(count, dtype), x, "sum")
        found = results(comm, op, shared, x, "sum")
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.tobytes() == theirs.tobytes()

    check_all(world, body)


def test_a_rank_with_an_ordinary_array_is_a_mismatch() -> None:
    """Ranks disagree only if they use the shared arrays."""

    def body(comm: Communicator) -> None:
        x = comm.empty(ENOUGH, np.float32) if comm.rank else np.empty(ENOUGH, np.float32)
        x[:] = 1
        comm.all_reduce(x)

    world = World([0, 0, 1, 1], timeout_s=20.0)
    try:
        outcomes = run(world, body)
    finally:
        world.abort()
    assert all(isinstance(each, MismatchError) for each in outcomes), outcomes
    assert any("Pass shared arrays" in str(each) for each in outcomes), outcomes


def test_a_child_group_has_shared_arrays(worlds: list[World]) -> None:
    def body(comm: Communicator) -> None:
        with comm.split(0, key=-comm.rank) as child:  # ranks in the opposite order
            x = child.empty(ENOUGH, np.float64)
            x[:] = child.rank
            assert child.shared_bytes >= x.nbytes
            child.all_reduce(x)
            assert (x == child.size * (child.size - 1) / 2).all()

    for world in worlds:
        check_all(world, body)


def test_without_memfd_arrays_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise OSError(errno.EPERM, "denied")

    monkeypatch.setattr(os, "memfd_create", denied)
    world = World([0, 0, 1, 1], timeout_s=20.0)

    def body(comm: Communicator) -> None:
        x = comm.empty(ENOUGH, np.float32)
        x[:] = 1
        assert comm.shared_bytes == 0
        assert (comm.all_reduce(x) == 4).all()

    try:
        check_all(world, body)
    finally:
        world.close()
