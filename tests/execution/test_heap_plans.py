"""Calls on arrays in shared heaps have the same result bits in both executors, for every plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from execution.test_spanning import LAYOUTS, SpanningThreadGroup
from schedule.test_write_back import crossed, star
from thread_group import TIMEOUT_S, Bytes, Pieces, ThreadGroup, alias, buffers, copies
from unisono import algorithms
from unisono.errors import MismatchError, UnsupportedError
from unisono.execution import Arguments, LoadedPlan, native_executor, reference
from unisono.schedule import Collective, Schedule, lower, lower_rank
from unisono.types import DType, Op, ReduceOp

EVERY = [(op, name) for op in Op for name in algorithms.names(op)]
STAGING_BYTES = 4 << 20
LONGEST_BYTES = 16 << 20
"""More than the pieces of any test."""
ThreadGroups = Callable[[int], ThreadGroup]


@pytest.fixture(scope="module")
def groups() -> Iterator[ThreadGroups]:
    """Returns groups whose calls of any length may use shared heaps."""
    made: dict[int, ThreadGroup] = {}

    def group(ranks: int) -> ThreadGroup:
        if ranks not in made:
            made[ranks] = ThreadGroup(ranks, STAGING_BYTES)
        return made[ranks]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_LEAST_HEAP_BYTES", "_LEAST_CROWDED_HEAP_BYTES"):
            patch.setattr(native_executor, name, 1)
        yield group
    for each in made.values():
        each.close()


def in_heaps(group: ThreadGroup, pieces: Pieces) -> Pieces:
    """Returns copies of the pieces in the heap of each rank."""
    return [
        [in_heap(group, rank, piece) for piece in of_rank] for rank, of_rank in enumerate(pieces)
    ]


def in_heap(group: ThreadGroup, rank: int, data: Bytes) -> Bytes:
    start = data.ctypes.data % 64  # keeps the alignment
    memory = group.groups[rank].allocate(data.size + start)[start:]
    memory[:] = data
    return memory


def heap_plans(
    group: ThreadGroup, op: Op, name: str, root: int, block_bytes: int
) -> list[LoadedPlan] | None:
    """Returns plans whose form for shared heaps has this block size, if there is such a form."""
    plans = [executor.plan(op, name, root) for executor in group.executors]
    forms = [plan.heap_plan() for plan in plans]
    assert len({form is None for form in forms}) == 1

    def with_blocks(plan: LoadedPlan, form: LoadedPlan | None) -> LoadedPlan:
        form = form and dataclasses.replace(form, block_bytes=block_bytes)
        return dataclasses.replace(plan, heap_plan=lambda: form)

    return None if None in forms else list(map(with_blocks, plans, forms))


def heap_lowering(group: ThreadGroup) -> dict[str, Any]:
    """Returns the arguments of `lower` for plans in shared heaps."""
    return {"shares_memory": True, "may_write_back": True, "hosts": group.hosts}


def longest_block_bytes(group: ThreadGroup, schedule: Schedule) -> int:
    """Returns the longest block whose slots fit in the staging memory, if blocks use it."""
    lowered = lower_rank(schedule, 0, **heap_lowering(group))
    if lowered.plan.addresses_only:
        return LONGEST_BYTES
    return int(group.groups[0].buffer_bytes // max(1, *lowered.slots)) & -4096


def compare(
    group: ThreadGroup,
    schedule: Schedule,
    plans: list[LoadedPlan],
    count: int,
    dtype: DType,
    reduction: ReduceOp = ReduceOp.SUM,
    *,
    block_bytes: int,
    in_place: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> None:
    collective = schedule.collective
    inputs, outputs = buffers(collective, [count] * group.ranks, dtype, seed, offset)
    expected, theirs = copies(outputs), copies(inputs)
    inputs, outputs = in_heaps(group, inputs), in_heaps(group, outputs)
    originals = copies(inputs)
    written_back = lower_rank(schedule, 0, **heap_lowering(group)).writes_back
    if in_place:
        alias(collective, inputs, outputs)
    if in_place or written_back:
        for rank, pieces in enumerate(expected if written_back else []):
            pieces[0][:] = theirs[rank][0]
        alias(collective, theirs, expected)
    reference.run(
        lower(schedule, **heap_lowering(group)),
        [pieces[: collective.input_pieces(rank)] for rank, pieces in enumerate(theirs)],
        [pieces[: collective.output_pieces(rank)] for rank, pieces in enumerate(expected)],
        dtype,
        reduction,
        block_bytes=block_bytes,
    )
    _run(group, plans, collective, count, dtype, reduction, inputs, outputs)
    for rank in range(group.ranks):
        for i in range(collective.output_pieces(rank)):
            assert outputs[rank][i].tobytes() == expected[rank][i].tobytes(), (rank, i)
        if not in_place:
            for x, original in zip(inputs[rank], originals[rank], strict=True):
                assert x.tobytes() == original.tobytes(), f"rank {rank}: the input was changed"


def _run(
    group: ThreadGroup,
    plans: list[LoadedPlan],
    collective: Collective,
    count: int,
    dtype: DType,
    reduction: ReduceOp,
    inputs: Pieces,
    outputs: Pieces,
) -> None:
    op, root = collective.op, collective.root
    args = Arguments(
        op=op, dtype=dtype, reduction=reduction, root=-1 if root is None else root, count=count
    )

    def rank(r: int) -> None:
        nbytes = count * dtype.size_bytes
        call = group.executors[r].prepare(plans[r], args, piece_bytes=nbytes)
        at = [(piece.ctypes.data, nbytes) for piece in inputs[r]]
        to = [(piece.ctypes.data, nbytes) for piece in outputs[r]]
        try:
            group.groups[r].run_pieces(call, at, to, TIMEOUT_S)
        except Exception as error:
            group.groups[r].abort(str(error))
            raise

    futures = [group.pool.submit(rank, r) for r in range(group.ranks)]
    for future in futures:
        future.result(2 * TIMEOUT_S)


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_anything(data: st.DataObject, groups: ThreadGroups) -> None:
    op, name = data.draw(st.sampled_from(EVERY))
    group = groups(data.draw(st.sampled_from([1, 2, 3, 4, 5, 8])))
    root = data.draw(st.integers(0, group.ranks - 1)) if op.rooted else -1
    schedule = algorithms.build(op, name, ranks=group.ranks, root=max(root, 0))
    longest = longest_block_bytes(group, schedule)
    block_bytes = data.draw(st.sampled_from([4096, 8192, longest]))
    plans = heap_plans(group, op, name, root, block_bytes)
    dtype = data.draw(st.sampled_from(list(DType)))
    reduction = data.draw(
        st.sampled_from(
            [r for r in ReduceOp if dtype.supports(r)] if op.reduces else [ReduceOp.SUM]
        )
    )
    if plans is None or (op.scans and reduction is ReduceOp.AVG):
        return
    compare(
        group,
        schedule,
        plans,
        data.draw(st.sampled_from([1, 7, 500, 511, 1025, 2049, 5000, 12_289])),
        dtype,
        reduction,
        block_bytes=block_bytes,
        in_place=op is not Op.ALL_TO_ALL and data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
        offset=data.draw(st.sampled_from([0, 16, 64])),
    )


@pytest.fixture(scope="module")
def spanning() -> Iterator[list[SpanningThreadGroup]]:
    """Returns groups on several hosts whose calls of any length may use shared heaps."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_LEAST_HEAP_BYTES", "_LEAST_CROWDED_HEAP_BYTES"):
            patch.setattr(native_executor, name, 1)
        made = [SpanningThreadGroup(hosts) for hosts in LAYOUTS]
    yield made
    for each in made:
        each.close()


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_anything_on_several_hosts(
    data: st.DataObject, spanning: list[SpanningThreadGroup]
) -> None:
    op, name = data.draw(st.sampled_from(EVERY))
    group = data.draw(st.sampled_from(spanning))
    root = data.draw(st.integers(0, group.ranks - 1)) if op.rooted else -1
    try:
        schedule = algorithms.build(
            op, name, ranks=group.ranks, root=max(root, 0), hosts=group.hosts
        )
    except UnsupportedError:
        return
    longest = longest_block_bytes(group, schedule)
    block_bytes = data.draw(st.sampled_from([4096, 8192, longest]))
    plans = heap_plans(group, op, name, root, block_bytes)
    if plans is None:
        return
    lead = data.draw(st.integers(0, 2))
    compare(
        group,
        schedule,
        [dataclasses.replace(plan, lead=lead) for plan in plans],
        data.draw(st.sampled_from([1, 511, 1025, 2049, 5000, 30_001])),
        data.draw(st.sampled_from([DType.FLOAT32, DType.FLOAT64, DType.INT32])),
        block_bytes=block_bytes,
        in_place=op is not Op.ALL_TO_ALL and data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
        offset=data.draw(st.sampled_from([0, 16, 64])),
    )


@pytest.mark.parametrize("make", [star, lambda ranks: star(ranks, ranks - 1)])
def test_ranks_that_only_receive_written_results(
    make: Callable[[int], Schedule], groups: ThreadGroups
) -> None:
    group, schedule = groups(3), make(3)
    for executor in group.executors:
        name = executor.adopt(schedule)
    plans = heap_plans(group, Op.ALL_REDUCE, name, -1, 8192)
    assert plans is not None
    assert lower_rank(schedule, 0, **heap_lowering(group)).writes_back
    for in_place in (False, True):
        compare(group, schedule, plans, 5001, DType.FLOAT32, block_bytes=8192, in_place=in_place)


def test_two_ranks_that_each_reduce_a_half(groups: ThreadGroups) -> None:
    group, schedule = groups(2), crossed()
    for executor in group.executors:
        name = executor.adopt(schedule)
    plans = heap_plans(group, Op.ALL_REDUCE, name, -1, 4096)
    assert plans is not None
    compare(group, schedule, plans, 3001, DType.FLOAT64, block_bytes=4096, in_place=True)


def test_in_place_and_separate_output_may_be_mixed(groups: ThreadGroups) -> None:
    group, count = groups(3), 4097
    collective = algorithms.build(Op.ALL_REDUCE, "direct", ranks=3).collective
    plans = heap_plans(group, Op.ALL_REDUCE, "direct", -1, 8192)
    assert plans is not None
    inputs = in_heaps(group, [[_floats(rank, count)] for rank in range(3)])
    outputs = in_heaps(group, [[np.zeros(4 * count, np.uint8)] for _ in range(3)])
    total = sum(pieces[0].view(np.float32).copy() for pieces in inputs)
    outputs[1] = inputs[1]
    _run(group, plans, collective, count, DType.FLOAT32, ReduceOp.SUM, inputs, outputs)
    for pieces in outputs:
        assert np.array_equal(pieces[0].view(np.float32), total)


def _floats(rank: int, count: int) -> Bytes:
    return np.arange(rank, rank + count, dtype=np.float32).view(np.uint8)


@pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.ALL_GATHER, Op.BROADCAST, Op.REDUCE])
def test_heaps_are_used(op: Op) -> None:
    """Ranks disagree if one of them cannot use its heap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_executor, "_LEAST_CROWDED_HEAP_BYTES", 1)
        patch.setattr(native_executor, "_LEAST_HEAP_BYTES", 1)
        group = ThreadGroup(2, STAGING_BYTES)
    root = 0 if op.rooted else -1
    collective = algorithms.build(op, "direct", ranks=2, root=0).collective
    plans = heap_plans(group, op, "direct", root, 8192)
    assert plans is not None
    inputs, outputs = buffers(collective, [1000, 1000], DType.FLOAT32, 0, 0)
    inputs, outputs = in_heaps(group, inputs), in_heaps(group, outputs)
    inputs[0] = [piece.copy() for piece in inputs[0]]
    outputs[0] = [piece.copy() for piece in outputs[0]]
    with pytest.raises(MismatchError, match="Pass shared arrays"):
        _run(group, plans, collective, 1000, DType.FLOAT32, ReduceOp.SUM, inputs, outputs)
    group.close()
