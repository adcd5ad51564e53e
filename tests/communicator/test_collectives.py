"""Every collective gives NumPy's result, for several numbers of ranks, lengths and types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cases_in_turn import turn
from ranks import Me, Processes, Threads
from unisono import Communicator, UnsupportedError, algorithms
from unisono.types import DType, Op, ReduceOp

Array = NDArray[Any]
World = Callable[[int], Threads]

RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16]
LENGTHS = [0, 1, 7, 1000]
SEVERAL_BLOCKS = 300_001
DTYPES = [
    np.dtype(name)
    for name in (
        "float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32",
        "int64", "uint64", "bool", "complex64", "complex128",
    )
]  # fmt: skip
# Reductions with a factor or an index are tested separately.
SPECIAL = (ReduceOp.PREMUL_SUM, ReduceOp.MINLOC, ReduceOp.MAXLOC)
REDUCTIONS = [reduction.name.lower() for reduction in ReduceOp if reduction not in SPECIAL]


def numbers(dtype: np.dtype[Any], ranks: int, count: int, top: int = 7) -> Array:
    """Returns small integers, one row per rank; their sums are exact in any order."""
    rng = np.random.default_rng(ranks * 1_000_003 + count)
    low = 0 if dtype.kind in "bu" else -top
    values = rng.integers(low, 2 if dtype.kind == "b" else top, size=(ranks, count))
    if dtype.kind == "c":
        return (values + 1j * rng.integers(low, top, size=(ranks, count))).astype(dtype)
    return values.astype(dtype)


def reduced(rows: Array, op: str) -> Array:
    """Returns the reduction of the rows by NumPy; integer averages round toward zero."""
    kind = rows.dtype.kind
    if op == "avg":
        total = np.add.reduce(rows, axis=0, dtype=rows.dtype)
        if kind not in "iu":
            return (total / len(rows)).astype(rows.dtype)
        signs = np.sign(total.astype(np.int64))
        return (np.abs(total.astype(np.int64)) // len(rows) * signs).astype(rows.dtype)
    functions = {
        "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
        "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    }  # fmt: skip
    logical = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}
    if op in logical:
        return np.asarray(logical[op].reduce(rows, axis=0), rows.dtype)
    result: Array = functions[op].reduce(rows, axis=0, dtype=rows.dtype)
    return result


def same(found: Array, expected: Array) -> None:
    """Asserts that two arrays have the same bits."""
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def check_all_reduce(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    x = rows[comm.rank].copy()
    assert comm.all_reduce(x, algorithm=algorithm) is x
    same(x, reduced(rows, "sum"))


def check_reduce(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    for root in {0, comm.size - 1, comm.size // 2}:
        x = rows[comm.rank].copy()
        assert comm.reduce(x, root, algorithm=algorithm) is x
        same(x, reduced(rows, "sum") if comm.rank == root else rows[comm.rank])


def check_broadcast(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    for root in {0, comm.size - 1, comm.size // 2}:
        x = rows[comm.rank].copy()
        assert comm.broadcast(x, root, algorithm=algorithm) is x
        same(x, rows[root])


def check_all_gather(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    x = rows[comm.rank].copy()
    same(comm.all_gather(x, algorithm=algorithm), rows.reshape(-1))
    out = np.zeros(rows.size, rows.dtype)
    assert comm.all_gather(x, out, algorithm=algorithm) is out
    same(out, rows.reshape(-1))
    same(x, rows[comm.rank])


def check_reduce_scatter(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    wide = np.concatenate([np.roll(rows, -d, axis=0) for d in range(comm.size)], axis=1)
    x, count = wide[comm.rank].copy(), rows.shape[1]
    mine = reduced(wide, "sum")[comm.rank * count : (comm.rank + 1) * count]
    same(comm.reduce_scatter(x, algorithm=algorithm), mine)
    out = np.zeros(count, rows.dtype)
    assert comm.reduce_scatter(x, out, algorithm=algorithm) is out
    same(out, mine)
    same(x, wide[comm.rank])


def check_all_to_all(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    n, count = comm.size, rows.shape[1]
    x = np.stack([rows[(comm.rank * 3 + d) % n] for d in range(n)])
    expected = np.stack([rows[(s * 3 + comm.rank) % n] for s in range(n)])
    same(comm.all_to_all(x, algorithm=algorithm), expected)
    out = np.zeros((n, count), rows.dtype)
    assert comm.all_to_all(x, out, algorithm=algorithm) is out
    same(out, expected)
    assert comm.all_to_all(x, x, algorithm=algorithm) is x
    same(x, expected)


def check_gather(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    for root in {0, comm.size - 1}:
        found = comm.gather(rows[comm.rank].copy(), root=root, algorithm=algorithm)
        if comm.rank == root:
            same(found, rows.reshape(-1))
        else:
            assert found is None


def check_scatter(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    for root in {0, comm.size - 1}:
        out = np.zeros(rows.shape[1], rows.dtype)
        x = rows.copy() if comm.rank == root else None
        assert comm.scatter(x, out, root, algorithm=algorithm) is out
        same(out, rows[comm.rank])


def check_scan(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    x = rows[comm.rank].copy()
    assert comm.scan(x, algorithm=algorithm) is x
    same(x, reduced(rows[: comm.rank + 1], "sum"))


def check_exscan(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    x = rows[comm.rank].copy()
    assert comm.exscan(x, algorithm=algorithm) is x
    same(x, reduced(rows[: comm.rank], "sum") if comm.rank > 0 else rows[0])


def check_barrier(comm: Communicator, rows: Array, algorithm: str | None) -> None:
    assert comm.barrier() is None


CHECKS: dict[Op, Callable[[Communicator, Array, str | None], None]] = {
    Op.ALL_REDUCE: check_all_reduce,
    Op.REDUCE: check_reduce,
    Op.BROADCAST: check_broadcast,
    Op.ALL_GATHER: check_all_gather,
    Op.REDUCE_SCATTER: check_reduce_scatter,
    Op.ALL_TO_ALL: check_all_to_all,
    Op.GATHER: check_gather,
    Op.SCATTER: check_scatter,
    Op.BARRIER: check_barrier,
    Op.SCAN: check_scan,
    Op.EXSCAN: check_exscan,
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("op", list(Op))
def test_every_length_and_type(op: Op, ranks: int, threads: World) -> None:
    """Tests each operation with each type, and each number of ranks with each length."""
    shift = list(Op).index(op) + RANKS.index(ranks)
    some = [DTYPES[(shift + i) % len(DTYPES)] for i in (0, 3, 6, 9, 12)]
    tables = [numbers(dtype, ranks, 7) for dtype in some]
    tables += [numbers(dtype, ranks, count) for dtype in some[:2] for count in (0, 1, 1000)]
    tables.append(numbers(DTYPES[shift % 3], ranks, 65537 if ranks < 9 else 9001))

    def check(comm: Communicator) -> None:
        for rows in tables:
            CHECKS[op](comm, rows, None)

    threads(ranks).run(check)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_messages_of_several_blocks(ranks: int, threads: World) -> None:
    rows = numbers(np.dtype("float32"), ranks, SEVERAL_BLOCKS // (1 if ranks < 8 else 4))

    def check(comm: Communicator) -> None:
        for op in Op:
            if comm.size < 8 or op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
                CHECKS[op](comm, rows, None)

    threads(ranks).run(check)


def everything(me: Me) -> None:
    comm = me.join()
    dtypes = [np.dtype(name) for name in ("float32", "float16", "int64", "bool", "complex64")]
    for op in Op:
        for i, count in enumerate((*LENGTHS, 65537)):
            for dtype in (dtypes[0], dtypes[i]):
                CHECKS[op](comm, numbers(dtype, comm.size, count), None)
        CHECKS[op](comm, numbers(dtypes[0], comm.size, SEVERAL_BLOCKS), None)
        for name in algorithms.names(op):
            CHECKS[op](comm, numbers(dtypes[2], comm.size, 9001), name)
    me.say("done")


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_works_with_processes(ranks: int) -> None:
    with Processes(everything, ranks) as processes:
        processes.wait_for("done", range(ranks), 60)
        assert processes.exit_codes() == [0] * ranks


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [(op, name) for op in Op if op is not Op.BARRIER for name in algorithms.names(op)],
)
def test_every_algorithm(op: Op, algorithm: str, threads: World) -> None:
    """Tests each algorithm with 1, 3 and 4 ranks, and also with either 2, 6, 8 or 13 ranks."""
    number = list(Op).index(op) + algorithms.names(op).index(algorithm)
    for ranks in (1, 3, 4, (2, 6, 8, 13)[number % 4]):
        with turn(ranks=ranks):
            try_algorithm(op, algorithm, ranks, threads)


def try_algorithm(op: Op, algorithm: str, ranks: int, threads: World) -> None:
    # With more ranks than cores, ranks mostly wait for each other, so three lengths are enough.
    lengths = (*LENGTHS, 9001) if ranks < 8 else (1, 1000, 9001)
    tables = [numbers(np.dtype("int32"), ranks, count) for count in lengths]
    tables.append(numbers(np.dtype("float16"), ranks, 130))
    if ranks == 3:
        tables.append(numbers(np.dtype("int32"), ranks, 140_003))

    def check(comm: Communicator) -> None:
        for rows in tables:
            CHECKS[op](comm, rows, algorithm)

    threads(ranks).run(check)


@pytest.mark.parametrize("algorithm", [None, *algorithms.names("all_reduce")])
def test_every_reduction_of_every_type(algorithm: str | None, threads: World) -> None:
    tables = {(dtype, op): numbers(dtype, 3, 77, top=4) for dtype in DTYPES for op in REDUCTIONS}

    def check(comm: Communicator) -> None:
        for (dtype, op), rows in tables.items():
            x = rows[comm.rank].copy()
            if not DType[dtype.name.upper()].supports(ReduceOp[op.upper()]):
                with pytest.raises(UnsupportedError, match=f"{dtype.name} does not support {op}"):
                    comm.all_reduce(x, op, algorithm=algorithm)
                same(x, rows[comm.rank])
                continue
            comm.all_reduce(x, op, algorithm=algorithm)
            np.testing.assert_allclose(x, reduced(rows, op), rtol=1e-6, err_msg=f"{dtype} {op}")
            if dtype.kind in "iub" or op != "avg":
                same(x, reduced(rows, op))

    threads(3).run(check)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_of_the_other_operations(op: str, threads: World) -> None:
    rows = numbers(np.dtype("int16"), 4, 4 * 50, top=4)

    def check(comm: Communicator) -> None:
        x = rows[comm.rank].copy()
        same(comm.reduce_scatter(x, op=op), reduced(rows, op).reshape(4, -1)[comm.rank])
        comm.reduce(x, 2, ReduceOp[op.upper()])
        same(x, reduced(rows, op) if comm.rank == 2 else rows[comm.rank])

    threads(4).run(check)


def test_integer_averages_round_toward_zero_and_sums_wrap(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.array([-1, -7, 7, -8], np.int32) if comm.rank == 0 else np.zeros(4, np.int32)
        assert comm.all_reduce(x, "avg").tolist() == [0, -3, 3, -4]
        big = np.array([200, 255], np.uint8)
        assert comm.all_reduce(big).tolist() == [144, 254]

    threads(2).run(check)


@pytest.mark.parametrize("algorithm", [None, *algorithms.names("all_reduce")])
def test_sums_of_half_floats_are_rounded_once(algorithm: str | None, threads: World) -> None:
    def check(comm: Communicator) -> None:
        # Rounded after each addition: 2048 + 1 = 2048. Rounded once at the end: 2048 + 4 * 1 =
        # 2052.
        x = np.full(100, 2048 if comm.rank == 0 else 1, np.float16)
        assert set(comm.all_reduce(x, algorithm=algorithm).tolist()) == {2052}
        x = np.full(100, 2048 if comm.rank == 0 else 1, np.float16)
        work = comm.all_reduce(x, algorithm=algorithm, async_op=True)
        assert set(work.wait().tolist()) == {2052}

    threads(5).run(check)


@pytest.mark.parametrize("algorithm", algorithms.names("reduce_scatter"))
def test_scattered_sums_of_half_floats_are_rounded_once(algorithm: str, threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.full(100, 2048 if comm.rank == 0 else 1, np.float16)
        assert set(comm.reduce_scatter(x, algorithm=algorithm).tolist()) == {2052}
        pieces = [np.full(7 + r, 2048 if comm.rank == 0 else 1, np.float16) for r in range(5)]
        out = np.zeros(7 + comm.rank, np.float16)
        assert set(comm.reduce_scatter(pieces, out, algorithm=algorithm).tolist()) == {2052}

    threads(5).run(check)


@pytest.mark.parametrize("algorithm", [None, *algorithms.names("all_reduce")])
def test_all_ranks_get_the_same_bits(algorithm: str | None, threads: World) -> None:
    x = np.random.default_rng(1).normal(size=(6, 5000)).astype(np.float32)

    def check(comm: Communicator) -> bytes:
        return bytes(comm.all_reduce(x[comm.rank].copy(), algorithm=algorithm).tobytes())

    bits = threads(6).run(check)
    assert len(set(bits)) == 1
    found = np.frombuffer(bits[0], np.float32)
    np.testing.assert_allclose(found, x.sum(axis=0, dtype=np.float64), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["scan", "exscan"])
def test_every_reduction_of_a_scan(op: str, threads: World) -> None:
    reductions = [name for name in REDUCTIONS if name != "avg"]
    tables = {name: numbers(np.dtype("int32"), 5, 77, top=4) for name in reductions}

    def check(comm: Communicator) -> None:
        for name, rows in tables.items():
            below = rows[: comm.rank + (op == "scan")]
            x = rows[comm.rank].copy()
            getattr(comm, op)(x, name)
            same(x, reduced(below, name) if len(below) else rows[0])
        with pytest.raises(UnsupportedError, match=f"{op} does not support avg"):
            getattr(comm, op)(np.ones(3), "avg")

    threads(5).run(check)


def test_exscan_does_not_write_to_the_array_of_rank_0(threads: World) -> None:
    def check(comm: Communicator) -> None:
        for _ in range(3):
            x = np.full(5, comm.rank + 1.0)
            x.setflags(write=comm.rank > 0)
            assert comm.exscan(x) is x
            same(x, np.full(5, [1.0, 1.0, 3.0][comm.rank]))

    threads(3).run(check)


def test_asynchronous_scans_and_scans_of_strided_arrays(threads: World) -> None:
    rows = numbers(np.dtype("int64"), 4, 1000)

    def check(comm: Communicator) -> None:
        x, y = np.zeros((1000, 2), np.int64), rows[comm.rank].copy()
        x[:, 1] = rows[comm.rank]
        works = [comm.scan(x[:, 1], async_op=True), comm.exscan(y, async_op=True)]
        for work in works:
            work.wait()
        same(x[:, 1].copy(), reduced(rows[: comm.rank + 1], "sum"))
        same(y, reduced(rows[: comm.rank], "sum") if comm.rank else rows[0])
        assert not x[:, 0].any()

    threads(4).run(check)
