"""Reductions other than plain sums: 8-bit floats, factors, logical operations, minloc, maxloc."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ranks import Threads
from unisono import (
    Communicator,
    MismatchError,
    UnsupportedError,
    algorithms,
    pairs,
    premul_sum,
)
from unisono.execution.fold import fold
from unisono.execution.narrow_floats import bits_of, narrowed, widened
from unisono.types import DType, ReduceOp

torch = pytest.importorskip("torch")

Array = NDArray[Any]
World = Callable[[int], Threads]

LENGTHS = [0, 1, 7, 1000]
RANKS = [*range(1, 10)]
FLOAT8 = [DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2]
ALGORITHMS = [None, *algorithms.names("all_reduce")]


def as_float8(values: Array, dtype: DType, offset: int = 0) -> Any:
    """Returns a tensor of the nearest 8-bit floats, at any address."""
    room = torch.zeros(values.size + offset, dtype=torch.uint8)
    bits = room[offset:]
    bits.copy_(torch.from_numpy(narrowed(values.astype(np.float32).ravel(), dtype)))
    return bits.view(getattr(torch, dtype.name.lower())).reshape(values.shape)


def bytes_of(tensor: Any) -> Array:
    """Returns the bytes of the elements."""
    found: Array = tensor.contiguous().view(torch.uint8).numpy()
    return found


def folded(rows: list[Array], dtype: DType, op: str) -> Array:
    """Returns the reduction, computed by its definition."""
    return fold(rows, dtype, ReduceOp[op.upper()], len(rows))


# ---- 8-bit floats


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_8_bit_floats_work_with_any_length_and_address(data: st.DataObject, threads: World) -> None:
    ranks = data.draw(st.sampled_from(RANKS))
    dtype, op = (
        data.draw(st.sampled_from(FLOAT8)),
        data.draw(st.sampled_from(["sum", "avg", "max"])),
    )
    count = data.draw(st.sampled_from(LENGTHS) | st.integers(0, 300))
    offset = data.draw(st.integers(0, 3))
    rows = np.random.default_rng(count).normal(size=(ranks, ranks * count)) * 20
    given = [bytes_of(as_float8(row, dtype)) for row in rows]
    expected = folded(given, dtype, op)

    def check(comm: Communicator) -> None:
        x = as_float8(rows[comm.rank], dtype, offset)
        share = comm.reduce_scatter(x, op=op)
        mine = expected[comm.rank * count : (comm.rank + 1) * count]
        assert bytes_of(share).tolist() == mine.tolist()
        assert comm.all_reduce(x, op, algorithm="direct") is x
        assert bytes_of(x).tolist() == expected.tolist()
        y = as_float8(rows[comm.rank], dtype, offset)
        comm.reduce(y, ranks - 1, op, algorithm="direct")
        wanted = expected if comm.rank == ranks - 1 else given[comm.rank]
        assert bytes_of(y).tolist() == wanted.tolist()

    threads(ranks).run(check)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_sums_of_8_bit_floats_are_rounded_once(
    dtype: DType, algorithm: str | None, threads: World
) -> None:
    values = np.full(100, 0.5)

    def check(comm: Communicator) -> None:
        # Rounded after each addition: 16 + 0.5 = 16. Rounded once at the end: 16 + 8 * 0.5 = 20.
        x = as_float8(values if comm.rank else values * 32, dtype)
        work = comm.all_reduce(x, algorithm=algorithm, async_op=True)
        assert set(work.wait().float().tolist()) == {20}
        x = as_float8(np.full((2, 3), np.nan if comm.rank == 1 else -1), dtype).T
        comm.all_reduce(x, algorithm=algorithm)
        assert set(bytes_of(x).ravel().tolist()) == {0x7F}

    threads(9).run(check)


def test_arrays_of_ml_dtypes_work(threads: World) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (*FLOAT8, DType.BFLOAT16):
        kind = np.dtype(getattr(ml_dtypes, dtype.name.lower()))

        def check(comm: Communicator, dtype: DType = dtype, kind: Any = kind) -> None:
            for algorithm in ALGORITHMS:
                x = np.full((3, 8), 16 if comm.rank == 0 else 0.5).astype(kind)[:, ::2]
                assert comm.all_reduce(x, algorithm=algorithm) is x
                assert set(widened(bits_of(x.copy(), dtype), dtype).ravel().tolist()) == {20}
            x = np.full(3, 448).astype(kind)
            if dtype is DType.FLOAT8_E4M3FN:  # our conversion saturates, but ml_dtypes gives a NaN
                assert comm.all_reduce(x, algorithm="ring").astype(np.float32).tolist() == [448] * 3

        threads(9).run(check)


# ---- factors


@pytest.mark.parametrize("kind", ["float32", "float64", "int32", "uint8", "complex64"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_rank_multiplies_by_its_own_factor(kind: str, ranks: int, threads: World) -> None:
    rng = np.random.default_rng(ranks)
    for count in LENGTHS:
        rows = rng.integers(0, 50, (ranks, ranks * count)).astype(kind)
        factors = [r + 1 if np.dtype(kind).kind in "iu" else 0.1 * (r + 1) for r in range(ranks)]
        products = [
            row * np.asarray(factor, kind) for row, factor in zip(rows, factors, strict=True)
        ]
        expected = functools.reduce(np.add, products)

        def check(
            comm: Communicator,
            rows: Array = rows,
            factors: list[Any] = factors,
            expected: Array = expected,
            count: int = count,
        ) -> None:
            op, n, me = premul_sum(factors[comm.rank]), comm.size, comm.rank
            for x in (rows[me].copy(), np.repeat(rows[me], 2)[::2], torch.tensor(rows[me])):
                assert comm.all_reduce(x, op, algorithm="direct") is x
                assert np.asarray(x).tobytes() == expected.tobytes()
            x = rows[me].copy()
            share = comm.reduce_scatter(x, op=op)
            assert share.tobytes() == expected[me * count : (me + 1) * count].tobytes()
            assert x.tobytes() == rows[me].tobytes()
            comm.reduce(x, n - 1, op, algorithm="direct")
            assert x.tobytes() == (expected if me == n - 1 else rows[me]).tobytes()
            pieces = list(rows[me].reshape(n, count).copy())
            out = comm.reduce_scatter(pieces, op=op, async_op=True).wait()
            assert out.tobytes() == expected[me * count : (me + 1) * count].tobytes()

        threads(ranks).run(check)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scaled_narrow_floats_are_rounded_once(algorithm: str | None, threads: World) -> None:
    third = np.float32(1 / 3)
    for kind in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        rows = (torch.arange(4 * 60).reshape(4, 60) % 17).to(kind)
        total = rows[0].float() * third
        for row in rows[1:]:
            total = total + row.float() * third
        expected = total.to(kind)
        rounded = (rows.float() * third).to(kind).float().sum(0).to(kind)
        # two roundings of this input differ from one rounding
        assert not torch.equal(rounded.float(), expected.float())

        def check(comm: Communicator, rows: Any = rows, expected: Any = expected) -> None:
            x = rows[comm.rank].clone()
            found = comm.all_reduce(x, premul_sum(1 / 3), algorithm=algorithm)
            gap = (found.float() - expected.float()).abs()
            if algorithm in (None, "direct", "one_shot"):
                assert gap.max() == 0
            x = rows[comm.rank].clone()
            assert comm.reduce_scatter(x, op=premul_sum(1 / 3)).dtype == x.dtype
            assert torch.equal(x.float(), rows[comm.rank].float())

        threads(4).run(check)


def test_factors_may_be_arrays(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.ones((2, 3))
        comm.all_reduce(x, premul_sum(np.array([1, 2, 3]) * (comm.rank + 1)))
        assert x.tolist() == [[3, 6, 9]] * 2
        y = torch.ones(2, 3, requires_grad=True)
        comm.all_reduce(y.detach(), premul_sum(torch.tensor([1, 2, 3])))
        assert y.tolist() == [[2, 4, 6]] * 2

    threads(2).run(check)


@pytest.mark.parametrize(
    ("x", "op", "error", "text"),
    [
        (np.ones(3), "premul_sum", UnsupportedError, r"needs a factor: op=unisono.premul_sum"),
        (np.ones(3), ReduceOp.PREMUL_SUM, UnsupportedError, "needs a factor"),
        (np.ones(3, int), premul_sum(0.5), UnsupportedError, "int64 .*not float64"),
        (np.ones(3), premul_sum(1j), UnsupportedError, "float64 .*not complex128"),
        (np.ones(3), premul_sum("2"), UnsupportedError, "expected numbers"),
        (np.ones(3), premul_sum(np.ones(4)), ValueError, "broadcast"),
        (np.ones(3, bool), premul_sum(2), UnsupportedError, "bool does not support premul_sum"),
        (np.ones(3), "land", UnsupportedError, "float64 does not support land; .* sum, prod"),
        (np.ones(3), "minloc", UnsupportedError, "float64 does not support minloc"),
        (pairs(np.ones(3), 0), "sum", UnsupportedError, "not support sum; it supports minloc"),
        (pairs(np.ones(3), 0), premul_sum(2), UnsupportedError, "float64_int64"),
    ],
)
def test_unsupported_reductions_leave_the_group_usable(
    x: Array, op: Any, error: type[Exception], text: str, threads: World
) -> None:
    def check(comm: Communicator) -> None:
        mine = x.copy()
        for call in (comm.all_reduce, lambda x, op: comm.reduce(x, 0, op)):
            with pytest.raises(error, match=text):
                call(mine, op)
        assert mine.tobytes() == x.tobytes()
        assert comm.all_reduce(np.ones(1)).tolist() == [2]

    threads(2).run(check)


def test_premul_sum_on_one_rank_only_is_a_mismatch() -> None:
    def check(comm: Communicator) -> None:
        comm.all_reduce(np.ones(3), "sum" if comm.rank else premul_sum(2))

    with Threads(2) as world:
        for outcome in world.outcomes(check):
            assert isinstance(outcome, MismatchError)
            assert "all_reduce(premul_sum, float64[3])" in str(outcome)


# ---- logical operations


@pytest.mark.parametrize("op", ["land", "lor", "lxor"])
@pytest.mark.parametrize("ranks", RANKS)
def test_logical_reductions_return_truth_values(op: str, ranks: int, threads: World) -> None:
    function = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}[op]
    rng = np.random.default_rng(ranks)
    tables = [
        rng.choice([0, 1, 2, 100], (ranks, ranks * count), p=[0.1, 0.3, 0.3, 0.3]).astype(kind)
        for kind in ("int8", "uint16", "int32", "int64", "bool")
        for count in LENGTHS
    ]

    def check(comm: Communicator) -> None:
        for rows in tables:
            expected = function.reduce(rows, axis=0).astype(rows.dtype)
            for algorithm in (None, "ring"):
                x = rows[comm.rank].copy()
                comm.all_reduce(x, op, algorithm=algorithm)
                assert x.tobytes() == expected.tobytes()
            x = rows[comm.rank].copy()
            mine = expected.reshape(comm.size, -1)[comm.rank]
            for _ in range(2):  # the second call takes the fast path
                assert comm.reduce_scatter(x, op=op).tobytes() == mine.tobytes()
            comm.reduce(x, 0, op)
            assert x.tobytes() == (rows[comm.rank] if comm.rank else expected).tobytes()

    threads(ranks).run(check)


# ---- minloc and maxloc


@pytest.mark.parametrize("kind", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("ranks", RANKS)
def test_minloc_and_maxloc_return_the_rank(kind: str, ranks: int, threads: World) -> None:
    # each algorithm runs with three of the nine numbers of ranks
    tried = (None, *ALGORITHMS[1 + ranks % 3 :: 3])
    rng = np.random.default_rng(ranks)
    tables = [rng.integers(-3, 3, (ranks, count)).astype(kind) for count in LENGTHS]
    if np.dtype(kind).kind == "f":
        tables.append(np.where(rng.random((ranks, 500)) < 0.2, np.nan, tables[-1][:, :500]))
        tables[-1] = tables[-1].astype(kind)

    def check(comm: Communicator) -> None:
        for rows in tables:
            for op, best in (("minloc", np.argmin), ("maxloc", np.argmax)):
                place = np.array([best(column) for column in rows.T], int)
                value = rows[place, np.arange(rows.shape[1])]
                for algorithm in tried:
                    x = pairs(rows[comm.rank], comm.rank)
                    assert comm.all_reduce(x, op, algorithm=algorithm) is x
                    assert x["index"].tolist() == place.tolist()
                    assert x["value"].tobytes() == value.tobytes()
                x = pairs(rows[comm.rank], comm.rank)
                comm.reduce(x, ranks - 1, op)
                if comm.rank == ranks - 1:
                    assert x["index"].tolist() == place.tolist()
                wide = np.concatenate([pairs(rows[comm.rank], comm.rank)] * ranks)
                assert comm.reduce_scatter(wide, op=op)["index"].tolist() == place.tolist()

    threads(ranks).run(check)


def test_pairs_may_have_any_field_names_and_layout(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.zeros((2, 6), [("loss", ">f4"), ("step", ">i4")])[:, ::2]
        x["loss"], x["step"] = -comm.rank, 7 + comm.rank
        comm.all_reduce(x, "minloc")
        assert set(x.ravel().tolist()) == {(-2.0, 9)}
        found = comm.all_gather(pairs([1, 2], comm.rank))
        assert found["index"].tolist() == [0, 0, 1, 1, 2, 2]
        padded = np.zeros(2, np.dtype([("v", "f4"), ("i", "i8")], align=True))
        with pytest.raises(UnsupportedError, match="elements of type"):
            comm.all_gather(padded)

    threads(3).run(check)


def test_pairs_refuses_values_and_indices_that_do_not_fit() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert pairs(tensor, np.arange(2)).tolist() == [(1.0, 0), (2.0, 1)]
    with pytest.raises(UnsupportedError, match="float16"):
        pairs(np.ones(2, np.float16), 0)
    with pytest.raises(UnsupportedError, match="index: expected integers"):
        pairs(np.ones(2), 0.5)
    with pytest.raises(OverflowError, match="int32"):
        pairs(np.ones(2, np.float32), 1 << 31)
