"""The native executor has the same result bits as the reference executor, for every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from thread_group import EVERYTHING, TIMEOUT_S, ThreadGroup, compare
from unisono import algorithms, native
from unisono.bootstrap.single_copy import NO_SINGLE_COPY
from unisono.config import DEFAULT_STAGING_BYTES
from unisono.errors import UnisonoError, UnsupportedError
from unisono.execution.native_executor import Arguments, block_bytes_for
from unisono.types import DType, Op, ReduceOp

EVERY = [(op, name) for op in Op for name in algorithms.names(op)]
RANKS = [*range(1, 10), 13, 16]
ThreadGroups = Callable[..., ThreadGroup]
LEAST_STAGING_BYTES = 1 << 12


@pytest.fixture(scope="module")
def groups() -> Iterator[ThreadGroups]:
    made: dict[tuple[int, int, bool], ThreadGroup] = {}

    def group(ranks: int, staging_bytes: int, shares_memory: bool = False) -> ThreadGroup:
        key = (ranks, staging_bytes, shares_memory)
        if key not in made:
            single_copy_rules = EVERYTHING if shares_memory else NO_SINGLE_COPY
            made[key] = ThreadGroup(ranks, staging_bytes, single_copy_rules=single_copy_rules)
        return made[key]

    yield group
    for each in made.values():
        each.close()


@contextmanager
def refusing_little_staging(staging_bytes: int) -> Iterator[None]:
    """Accepts the error that the smallest staging buffers are too small for algorithms with many
    slots.
    """
    try:
        yield
    except UnsupportedError as error:
        assert "raise UNISONO_STAGING_BYTES" in str(error)
        assume(staging_bytes > LEAST_STAGING_BYTES)
        raise


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_anything(data: st.DataObject, groups: ThreadGroups) -> None:
    op, name = data.draw(st.sampled_from(EVERY))
    ranks = data.draw(st.sampled_from(RANKS))
    root = data.draw(st.integers(0, ranks - 1))
    staging_bytes = data.draw(st.sampled_from([LEAST_STAGING_BYTES, DEFAULT_STAGING_BYTES]))
    group = groups(ranks, staging_bytes, data.draw(st.booleans()))
    with refusing_little_staging(staging_bytes):
        group.plans(op, name, root, None)
    dtype = data.draw(st.sampled_from(DType))
    reductions = [r for r in ReduceOp if dtype.supports(r) and not (op.scans and r is ReduceOp.AVG)]
    reduction = data.draw(st.sampled_from(reductions))
    plans = group.plans(op, name, root, None)
    in_place = all(plan.in_place for plan in plans) and data.draw(st.booleans())
    length = st.integers(0, 400)
    if plans[0].uniform or (in_place and op is Op.ALL_TO_ALL):
        counts = [data.draw(length)] * ranks
    else:
        counts = data.draw(st.lists(length, min_size=ranks, max_size=ranks))
    compare(
        group, op, name, counts, root=root, dtype=dtype, reduction=reduction,
        block_bytes=data.draw(st.sampled_from([64, 128, 1024, 4096])), in_place=in_place,
        seed=data.draw(length), offset=data.draw(st.sampled_from([0, 16, 1, 63])),
    )  # fmt: skip


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_every_algorithm_over_many_blocks(op: Op, name: str, groups: ThreadGroups) -> None:
    for ranks in (2, 5, 8) if EVERY.index((op, name)) % 2 else (2, 3):
        counts = [4001] * ranks
        for shares_memory in (False, True):
            group = groups(ranks, 1 << 20, shares_memory)
            compare(group, op, name, counts, root=ranks - 1, block_bytes=4096)


@pytest.mark.parametrize("dtype", list(DType))
def test_every_reduction_of_every_type(dtype: DType, groups: ThreadGroups) -> None:
    for reduction in ReduceOp:
        if not dtype.supports(reduction):
            continue
        for name in ("ring", "one_shot"):
            compare(
                groups(5, 1 << 20), Op.ALL_REDUCE, name, [1003] * 5, dtype=dtype,
                reduction=reduction, block_bytes=1024, in_place=True, offset=1,
            )  # fmt: skip


def test_blocks_of_the_size_that_is_chosen(groups: ThreadGroups) -> None:
    group = groups(3, 1 << 20)
    for name in algorithms.names(Op.ALL_REDUCE):
        compare(group, Op.ALL_REDUCE, name, [200_003] * 3, in_place=True)


def test_blocks_fit_the_staging_and_hold_whole_elements() -> None:
    for slots, depth, buffer in [([1] * 2, 3, 1 << 20), ([16] * 16, 2, 1 << 18), ([0, 0], 2, 4096)]:
        block = block_bytes_for(slots, depth, buffer)
        assert block % 4096 == 0
        assert block * max(slots) <= buffer
    assert native.last_level_cache_bytes() > 0
    with pytest.raises(UnsupportedError, match="UNISONO_STAGING_BYTES"):
        block_bytes_for([64, 64], 2, 64 * 1024)


def test_a_plan_is_loaded_once(groups: ThreadGroups) -> None:
    executor = groups(4, 1 << 20).executors[1]
    assert executor.plan(Op.ALL_REDUCE, "ring", -1) is executor.plan(Op.ALL_REDUCE, "ring", -1)
    with pytest.raises(UnsupportedError, match="no algorithm 'none'"):
        executor.plan(Op.ALL_REDUCE, "none", -1)


def test_plans_are_for_the_hosts_that_the_executor_is_told() -> None:
    group = ThreadGroup(5, 1 << 20, hosts=((0, 3), (1,), (2, 4)))
    try:
        for op in Op:
            for name in algorithms.names(op):
                if op is not Op.BARRIER and algorithms.find(op, name).for_hosts:
                    compare(group, op, name, [1003] * 5, root=3)
    finally:
        group.close()


def test_nonsense_never_reaches_the_memory(groups: ThreadGroups) -> None:
    group = groups(1, 1 << 20)
    plan = group.plans(Op.ALL_REDUCE, "direct", -1, None)[0]
    args = Arguments(op=Op.ALL_REDUCE, dtype=DType.FLOAT32, count=1)
    call = group.executors[0].prepare(plan, args)
    with pytest.raises(UnisonoError, match="pieces"):
        group.groups[0].run_pieces(call, [], [], TIMEOUT_S)
    whole: dict[str, Any] = {
        "packed": b"", "readers": b"", "rank": 0, "ranks": 1, "pieces_in": 1, "pieces_out": 1,
        "parts": 1, "stages": 1, "rounds": 1, "slots": [0], "scratch": 0,
    }  # fmt: skip
    for wrong in (
        {"packed": b"x"}, {"rank": 1}, {"slots": []}, {"parts": 0},
        {"packed": bytes([9]) + bytes(47)}, {"packed": bytes([3]) + bytes(47)},
        {"packed": bytes(47) + b"\0", "pieces_in": 0}, {"packed": bytes([1]) + bytes(47)},
        {"readers": b"x"}, {"readers": bytes(8)},
    ):  # fmt: skip
        with pytest.raises(UnisonoError, match="plan"):
            native.Plan(**{**whole, **wrong})
