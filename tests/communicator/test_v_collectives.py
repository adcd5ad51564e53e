"""V-collectives give NumPy's results for all counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranks import Threads
from time_limits import limit_s
from unisono import Communicator, algorithms, pairs

World = Callable[[int], Threads]

RANKS = [1, 2, 3, 4, 5, 8, 13]
SEVERAL_BLOCKS = 300_001


def filled(rank: int, count: int, width: int | None, dtype: str = "int32") -> Any:
    """Returns `count` rows. Each element is its index in the array plus 1000 * `rank`."""
    shape = (count,) if width is None else (count, width)
    return (np.arange(np.prod(shape)).reshape(shape) + 1000 * rank).astype(dtype)


def same(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def check_gathers(comm: Communicator, counts: list[int], width: int | None, told: bool) -> None:
    me, n = comm.rank, comm.size
    x = filled(me, counts[me], width)
    every = [filled(r, counts[r], width) for r in range(n)]
    given_counts = counts if told else None
    same(comm.all_gather_v(x, given_counts), np.concatenate(every))
    out = np.full_like(np.concatenate(every), -1)
    assert comm.all_gather_v(x, given_counts, out) is out
    same(out, np.concatenate(every))
    listed = [np.full_like(piece, -1) for piece in every]
    assert comm.all_gather_v(x, given_counts, listed) is listed
    views = comm.all_gather_v(x, given_counts, pieces=True, async_op=True).wait()
    for piece, other, expected in zip(listed, views, every, strict=True):
        same(piece, expected)
        same(other, expected)
    root = n // 2
    found = comm.gather_v(x, given_counts, root)
    pieces = comm.gather_v(x, given_counts, root, pieces=True, async_op=True).wait()
    if me == root:
        same(found, np.concatenate(every))
        assert [len(piece) for piece in pieces] == counts
    else:
        assert found is None
        assert pieces is None


def check_scatters(comm: Communicator, counts: list[int], width: int | None, told: bool) -> None:
    me, n = comm.rank, comm.size
    root = n // 2
    whole = filled(7, sum(counts), width)
    mine = np.split(whole, np.cumsum(counts)[:-1])[me]
    out = np.full_like(mine, -1)
    x = whole if me == root else None
    assert comm.scatter_v(x, counts if told else None, root, out) is out
    same(out, mine)
    listed = np.split(whole, np.cumsum(counts)[:-1]) if me == root else None
    where = None if me == root else np.full_like(mine, -1)
    work = comm.scatter_v(listed, counts if told else None, root, where, async_op=True)
    same(work.wait(), mine)
    rows = np.stack([filled(r, sum(counts), width) for r in range(n)])
    total = np.split(rows.sum(axis=0, dtype=rows.dtype), np.cumsum(counts)[:-1])[me]
    same(comm.reduce_scatter_v(rows[me], counts), total)
    assert comm.reduce_scatter_v(rows[me], counts, out, "max", async_op=True).wait() is out
    same(out, np.split(rows.max(axis=0), np.cumsum(counts)[:-1])[me])


def check_all_to_all(comm: Communicator, table: Any, width: int | None, told: bool) -> None:
    me, n = comm.rank, comm.size
    x = filled(me, table[me].sum(), width)
    every = [np.split(filled(s, table[s].sum(), width), np.cumsum(table[s])[:-1]) for s in range(n)]
    expected = [every[s][me] for s in range(n)]
    sends = table if told else table[me].tolist()
    same(comm.all_to_all_v(x, sends), np.concatenate(expected))
    out = np.full_like(np.concatenate(expected), -1)
    assert comm.all_to_all_v(x, sends, table[:, me], out) is out
    same(out, np.concatenate(expected))
    pieces = comm.all_to_all_v(x, sends, pieces=True, async_op=True).wait()
    for piece, wanted in zip(pieces, expected, strict=True):
        same(piece, wanted)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_v_collective_works_with_any_number_of_ranks(
    ranks: int, told: bool, threads: World
) -> None:
    rng = np.random.default_rng(ranks)
    some = [int(count) for count in rng.choice([0, 1, 5, 1000], ranks)]
    one = [0] * (ranks - 1) + [70_001 if ranks < 9 else 3]
    table = rng.choice([0, 0, 1, 6, 500], (ranks, ranks))

    def check(comm: Communicator) -> None:
        for counts in (some, one, [0] * ranks, [4] * ranks):
            check_gathers(comm, counts, None, told)
            check_scatters(comm, counts, None, told)
        check_gathers(comm, some, 3, told)
        check_scatters(comm, some, 3, told)
        for width in (None, 2):
            check_all_to_all(comm, table, width, told)
        check_all_to_all(comm, np.zeros_like(table), None, told)
        check_all_to_all(comm, np.full_like(table, 2), None, told)

    threads(ranks).run(check)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_counts_give_numpys_results(data: st.DataObject, threads: World) -> None:
    ranks = data.draw(st.integers(1, 5))
    count = st.one_of(st.integers(0, 9), st.sampled_from([127, 4096, 70_001]))
    counts = data.draw(st.lists(count, min_size=ranks, max_size=ranks))
    rows = st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks)
    table = np.array(data.draw(st.lists(rows, min_size=ranks, max_size=ranks)))
    width, told = data.draw(st.sampled_from([None, 0, 1, 3])), data.draw(st.booleans())

    def check(comm: Communicator) -> None:
        check_gathers(comm, counts, width, told)
        check_scatters(comm, counts, width, told)
        check_all_to_all(comm, table, width, told)

    threads(ranks).run(check)


def test_v_collectives_of_several_blocks(threads: World) -> None:
    counts = [SEVERAL_BLOCKS, 3, 0, 140_000]
    table = np.array([[0, SEVERAL_BLOCKS, 1, 0], [2] * 4, [0] * 4, [140_000, 0, 0, 5]])

    def check(comm: Communicator) -> None:
        for told in (False, True):
            check_gathers(comm, counts, None, told)
            check_scatters(comm, counts, None, told)
            check_all_to_all(comm, table, None, told)

    threads(4).run(check)


def test_v_collectives_of_any_layout_and_type(threads: World) -> None:
    counts = [2, 0, 3]

    def check(comm: Communicator) -> None:
        me = comm.rank
        for dtype in ("int8", "float16", "complex128", "bool", ">i4"):
            wide = np.zeros((counts[me], 4), dtype)
            wide[...] = me % 2
            out = np.zeros((5, 8), dtype)[:, ::4]
            assert comm.all_gather_v(wide[:, ::2], counts, out) is out
            assert out[:, 0].tolist() == [0, 0, 0, 0, 0]
            share = comm.scatter_v(out if me == 1 else None, None, 1, np.zeros_like(wide)[:, :2])
            assert share.shape == (counts[me], 2)
        x = filled(me, 5, 4, "float64")[:, ::-1]
        every = sum(filled(r, 5, 4, "float64")[:, ::-1] for r in range(3))
        same(comm.reduce_scatter_v(x, counts), np.split(every, [2, 2])[me])
        half = np.full(5, 2048 if me == 0 else 1, np.float16)
        for algorithm in algorithms.names("reduce_scatter"):
            found = comm.reduce_scatter_v(half, counts, algorithm=algorithm)
            assert found.tolist() == [2050] * counts[me]  # 2048 + 1 + 1, rounded once

    threads(3).run(check)


@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_v_collectives_of_pairs(kind: str, threads: World) -> None:
    counts = [2, 0, 3]

    def check(comm: Communicator) -> None:
        me = comm.rank
        x = pairs(np.full(counts[me], -me, kind), me)
        for told in (counts, None):
            found = comm.all_gather_v(x, told)
            assert found["index"].tolist() == [0, 0, 2, 2, 2]
            assert found["value"].tolist() == [0, 0, -2, -2, -2]
            share = comm.scatter_v(found if me == 1 else None, told, 1, np.zeros_like(x))
            assert share.tobytes() == x.tobytes()
        every = comm.gather_v(x, counts, 2)
        assert every is None or every.tobytes() == found.tobytes()
        back = comm.all_to_all_v(found, [me, 5 - me, 0], pieces=True)
        assert [len(piece) for piece in back] == ([0, 1, 2], [5, 4, 3], [0, 0, 0])[me]
        best = comm.reduce_scatter_v(pairs(np.full(5, me, kind), me), counts, op="maxloc")
        assert best.tolist() == [(2, 2)] * counts[me]

    threads(3).run(check)


def test_v_collectives_of_tensors(threads: World) -> None:
    torch = pytest.importorskip("torch")
    counts = [2, 0, 3]

    def check(comm: Communicator) -> None:
        me = comm.rank
        x = torch.full((counts[me], 2), float(me))
        for told in (counts, torch.tensor(counts), None):
            found = comm.all_gather_v(x, told)
            assert found[:, 1].tolist() == [0, 0, 2, 2, 2]
        back = comm.all_to_all_v(found, [me, 5 - me, 0], pieces=True)
        assert [len(piece) for piece in back] == ([0, 1, 2], [5, 4, 3], [0, 0, 0])[me]
        assert all(isinstance(piece, torch.Tensor) for piece in back)

    threads(3).run(check)


def test_the_input_may_lie_in_the_output(threads: World) -> None:
    counts = [3, 70_001, 5]

    def check(comm: Communicator) -> None:
        me = comm.rank
        start = sum(counts[:me])
        for told in (counts, None):
            whole = np.full(sum(counts), -1)
            mine = whole[start : start + counts[me]]
            mine[:] = me
            comm.all_gather_v(mine, told, whole)
            assert (whole == np.repeat(range(3), counts)).all()
        before = whole.copy()
        comm.all_to_all_v(whole, counts, [counts[me]] * 3, np.empty(3 * counts[me], whole.dtype))
        assert (whole == before).all()
        x = filled(me, 9, None)
        comm.all_to_all_v(x, [3, 3, 3], out=x)
        same(x, np.concatenate([filled(r, 9, None)[3 * me : 3 * me + 3] for r in range(3)]))

    threads(3).run(check)


def test_an_asynchronous_uneven_call_returns_at_once_and_keeps_the_order(threads: World) -> None:
    """Tests that the call returns before its peers arrive: the exchange of counts does not delay
    it.
    """
    came = threading.Event()

    def check(comm: Communicator) -> None:
        me = comm.rank
        if me:
            came.wait(20)
        started = time.monotonic()
        first = comm.all_to_all(
            [np.full(r + me, me) for r in range(3)],
            [np.zeros(r + me, np.int64) for r in range(3)],
            async_op=True,
        )
        second = comm.all_gather_v(np.full(me, me), async_op=True)
        third = comm.all_reduce(np.full(2, me), async_op=True)
        if me == 0:
            assert time.monotonic() - started < limit_s(1)  # the peers wait for up to 20 s
            assert not third.is_completed()
            came.set()
        assert third.wait().tolist() == [3, 3]
        assert first.is_completed()
        assert second.is_completed()
        assert second.result().tolist() == [1, 2, 2]
        assert [piece.tolist() for piece in first.result()] == [[r] * (r + me) for r in range(3)]

    threads(3).run(check)


def test_even_counts_match_the_ordinary_call(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.full(4, comm.rank)
        every = np.repeat([0, 1], 4).tolist()
        found = comm.all_gather(x) if comm.rank else comm.all_gather_v(x, [4, 4])
        assert found.tolist() == every

    threads(2).run(check)
