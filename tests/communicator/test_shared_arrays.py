"""Collectives on shared arrays have the bits of those on ordinary arrays, and misuse is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from communicator.c_functions import CGroup
from ranks import Threads
from time_limits import limit_s
from unisono import Communicator, MismatchError, premul_sum
from unisono.controller import Controller
from unisono.types import Op, ReduceOp

Array = NDArray[Any]
World = Callable[[int], Threads]
Made = Callable[..., Array]

KIB = 1 << 10
DTYPES = ("float32", "float64", "float16", "int8", "uint16", "int64", "bool", "complex128")
BYTES = (
    1, 4 * KIB - 8, 4 * KIB, 4 * KIB + 24, 32 * KIB - 16, 32 * KIB, 32 * KIB + 8, 100 * KIB + 16,
    512 * KIB - 64, 512 * KIB + 16, 1200 * KIB + 8,
)  # fmt: skip
"""Around the least bytes of a call in heaps with a core for each rank and with fewer cores, and
around the end of a block of results that ranks forward."""


def numbers(dtype: str, rank: int, count: int, seed: int = 0) -> Array:
    rng = np.random.default_rng([rank, count, seed])
    return (rng.standard_normal(count) * 20).astype(dtype)


def results(comm: Communicator, op: Op, made: Made, x: Array, reduction: str) -> list[Array]:
    """Runs an operation on arrays that `made(shape)` makes. Returns all results of this rank."""
    n, me, count = comm.size, comm.rank, len(x)
    root = (count + n) % n
    mine, wide = made(count), made(n * count)
    mine[:] = x
    wide[:] = np.concatenate([np.roll(x, shift) for shift in range(n)])
    if op is Op.ALL_REDUCE:
        comm.all_reduce(mine, reduction)
        return [mine]
    if op is Op.REDUCE:
        comm.reduce(mine, root, reduction)
        return [mine]
    if op is Op.BROADCAST:
        comm.broadcast(mine, root)
        return [mine]
    if op in (Op.SCAN, Op.EXSCAN):
        scan = comm.scan if op is Op.SCAN else comm.exscan
        scan(mine, reduction)
        return [mine]
    if op is Op.ALL_GATHER:
        part = wide[me * count : (me + 1) * count]
        out = comm.all_gather(mine, made(n * count))
        comm.all_gather(part, wide)
        return [out, wide, comm.all_gather(mine)]
    if op is Op.REDUCE_SCATTER:
        out = comm.reduce_scatter(wide, made(count), reduction)
        return [out, wide, comm.reduce_scatter(wide, op=reduction)]
    if op is Op.ALL_TO_ALL:
        out = comm.all_to_all(wide, made(n * count))
        comm.all_to_all(wide, wide)
        return [out, wide]
    if op is Op.GATHER:
        found = comm.gather(mine, made(n * count) if me == root else None, root)
        return [mine] if found is None else [found, mine]
    if op is Op.SCATTER:
        comm.scatter(wide if me == root else None, mine, root)
        return [mine]
    comm.barrier()
    return []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@given(data=st.data())
@settings(max_examples=25)
def test_bits_are_those_of_ordinary_arrays(ranks: int, threads: World, data: st.DataObject) -> None:
    op, dtype = data.draw(st.sampled_from(list(Op))), data.draw(st.sampled_from(DTYPES))
    count = max(1, data.draw(st.sampled_from(BYTES)) // np.dtype(dtype).itemsize)
    allowed = {"b": ["max", "lor"], "c": ["sum", "prod"], "f": ["sum", "min", "avg"]}
    reductions = allowed.get(np.dtype(dtype).kind, ["sum", "bxor", "max", "avg"])
    if op in (Op.SCAN, Op.EXSCAN):
        reductions = [each for each in reductions if each != ReduceOp.AVG.name.lower()]
    reduction = data.draw(st.sampled_from(reductions))
    seed = data.draw(st.integers(0, 9))

    def check(comm: Communicator) -> None:
        x = numbers(dtype, comm.rank, count, seed)

        def shared(count: int) -> Array:
            return comm.empty(count, dtype)

        with np.errstate(all="ignore"):
            expected = results(comm, op, lambda count: np.empty(count, dtype), x, reduction)
        found = results(comm, op, shared, x, reduction)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.tobytes() == theirs.tobytes()

    threads(ranks).run(check)


def test_views_of_shared_arrays(threads: World) -> None:
    """Slices and reshaped views are shared; views with gaps are copied."""

    def check(comm: Communicator) -> None:
        n = comm.size
        x = comm.empty((6, 50_000), np.float32)
        for view in (x[1:3], x[2], x.reshape(-1)[7:200_001], x.reshape(3, 2, -1)[1], x[:, ::2]):
            x[:] = comm.rank + 1
            assert comm.all_reduce(view) is view
            assert (view == n * (n + 1) / 2).all()
        assert (x[:, 1::2] == comm.rank + 1).all()

    threads(3).run(check)


def test_other_ways_to_call(threads: World) -> None:
    """Tests asynchronous calls, batches, several works at once, factors, and uneven pieces."""

    def check(comm: Communicator) -> None:
        n, me, count = comm.size, comm.rank, 40_000
        total = n * (n + 1) / 2
        arrays = [comm.empty(count, np.float64) for _ in range(4)]
        for x in arrays:
            x[:] = me + 1
        for work in [comm.all_reduce(x, async_op=True) for x in arrays]:
            assert (work.wait() == total).all()
        for x in arrays:
            x[:] = me + 1
        few = comm.empty(3, np.float64)
        few[:] = me + 1
        with comm.batch():
            for x in (*arrays, few):
                comm.all_reduce(x)
        assert all((x == total).all() for x in (*arrays, few))
        x = arrays[0]
        x[:] = me + 1
        comm.all_reduce(x, premul_sum(1.0 if me == 0 else 2.0))
        assert (x == 2 * total - 1).all()
        counts = [10_000 * (rank + 1) for rank in range(n)]
        mine = comm.empty(counts[me], np.float64)
        mine[:] = me
        out = comm.all_gather_v(mine, counts)
        assert (out == np.repeat(np.arange(n), counts)).all()
        other = (me + 1) % n
        send, got = arrays[1], arrays[2]
        send[:] = me
        work = comm.send(send, other, async_op=True)
        comm.recv(got, (me - 1) % n)
        work.wait()
        assert (got == (me - 1) % n).all()

    threads(3).run(check)


def test_arrays_of_another_communicator_are_ordinary_there(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with comm.split(0, key=-comm.rank) as child:
            assert child is not None
            mine, theirs = comm.empty(50_000), child.empty(50_000)
            for x in (mine, theirs):
                for group in (comm, child):
                    x[:] = comm.rank
                    group.all_reduce(x)
                    assert (x == 3).all()
            # an array of the other communicator counts as ordinary, also beside ordinary arrays
            x = theirs if comm.rank == 0 else np.empty(50_000)
            x[:] = comm.rank
            comm.all_reduce(x)
            assert (x == 3).all()

    threads(3).run(check)


def test_reproducible_groups_use_them() -> None:
    x = [numbers("float32", rank, 70_001) * np.float32(1e30) ** (rank - 1) for rank in range(3)]

    def check(comm: Communicator) -> tuple[bytes, bytes]:
        ours, theirs = comm.empty(70_001, np.float32), x[comm.rank].copy()
        ours[:] = theirs
        return comm.all_reduce(ours).tobytes(), comm.all_reduce(theirs).tobytes()

    with Threads(3, reproducible=True) as world:
        found = world.run(check)
    assert len({bits for pair in found for bits in pair}) == 1


def test_controller_accepts_them(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm) as controller:
            arrays = [comm.empty(n, np.float32) for n in (10, 100_000, 400_000)]
            for x in arrays:
                x[:] = 1
            order = arrays if comm.rank else arrays[::-1]
            handles = [controller.all_reduce(f"{len(x)}", x) for x in order]
            for handle in handles:
                handle.wait()
            assert all((x == comm.size).all() for x in arrays)

    threads(2).run(check)


def test_c_interface_accepts_them(threads: World) -> None:
    """Tests also that a rank may reduce in place while another has a separate result."""

    def check(comm: Communicator) -> None:
        count, group = 60_000, CGroup.of(comm)
        x, out = comm.empty(count, np.float32), comm.empty(count, np.float32)
        x[:] = comm.rank + 1
        group.run("ALL_REDUCE", x, out, count)
        assert (out == 6).all() and (x == comm.rank + 1).all()
        result = x if comm.rank == 1 else out
        group.run("ALL_REDUCE", x, result, count)
        assert (result == 6).all()

    threads(3).run(check)


def test_torch_tensors_of_them(threads: World) -> None:
    torch = pytest.importorskip("torch")

    def check(comm: Communicator) -> None:
        x = comm.empty(90_000, np.float32)
        tensor = torch.from_numpy(x)
        x[:] = comm.rank
        assert comm.all_reduce(tensor) is tensor
        assert (x == 1).all()

    threads(2).run(check)


@pytest.mark.parametrize("ordinary", [0, 2])
def test_one_rank_with_an_ordinary_array_is_refused_everywhere(ordinary: int) -> None:
    def call(comm: Communicator) -> float:
        x: Array = comm.empty(60_000, np.float32)
        if comm.rank == ordinary:
            x = np.empty(60_000, np.float32)
        x[:] = 1
        start = time.monotonic()
        with pytest.raises(MismatchError, match=r"Pass shared arrays .* on all ranks, or on none"):
            comm.all_reduce(x)
        return time.monotonic() - start

    with Threads(3) as world:
        assert max(world.outcomes(call)) < limit_s(1)


@pytest.mark.parametrize("single_copy", ["always", "never"])
def test_messages_of_shared_arrays(single_copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver reads a long message in the sender's heap, whatever the kernel permits."""
    monkeypatch.setenv("UNISONO_SINGLE_COPY", single_copy)

    def check(comm: Communicator) -> None:
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        for count in (1, 2000, 5000, 40_000, 300_007, 3_000_001):
            x, out = comm.empty(count, np.float32), comm.empty(count, np.float32)
            x[:] = np.arange(count) % 1000 + comm.rank
            expected = np.arange(count) % 1000 + left
            for source, target in ((x, out), (x, np.empty_like(x)), (x.copy(), out)):
                target[:] = -1
                comm.sendrecv(source, right, target, left)
                assert (target == expected).all()
            if count > 1:
                comm.sendrecv(x[1:], right, out[:-1], left)
                assert (out[:-1] == expected[1:]).all()

    with Threads(3) as world:
        world.run(check)
