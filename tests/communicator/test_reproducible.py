"""With reproducible=True, an element's bits depend only on the ranks' contributions to it.

The expected bits come from a fold in NumPy in this file, over contributions with extreme exponents.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import unisono
from ranks import Threads, unique_name
from unisono import Communicator, MismatchError, UnsupportedError, algorithms, premul_sum
from unisono.schedule import check, folds_in_rank_order, from_json, to_json, trace

Array = NDArray[Any]
World = Callable[[int], Threads]

RANKS = range(2, 9)
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "avg": np.add,
    "min": lambda a, b: np.where((a < b) | np.isnan(a), a, b),
    "max": lambda a, b: np.where((a > b) | np.isnan(a), a, b),
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[World]:
    found: dict[int, Threads] = {}

    def world(ranks: int) -> Threads:
        if ranks not in found or not found[ranks].healthy:
            found[ranks] = Threads(ranks, reproducible=True)
        return found[ranks]

    yield world
    for each in found.values():
        each.close()


# ---- contributions and expected results


def wild(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    """Returns random bit patterns of floats: subnormal, huge and infinite values, both zeros, and
    NaNs of any sign and payload. An array of bfloat16 values has the type uint16.
    """
    if kind.startswith("complex"):
        part = "float32" if kind == "complex64" else "float64"
        return wild(rng, part, (*shape[:-1], 2 * shape[-1])).view(kind)
    size = 2 if kind == "bfloat16" else np.dtype(kind).itemsize
    bits = (
        rng.integers(0, 1 << 8 * size, shape, BITS[size], endpoint=False)
        if size < 8
        else (rng.integers(0, 1 << 64, shape, np.uint64, endpoint=False))
    )
    if kind == "bfloat16":
        one, infinity, nan = 0x3F80, 0x7F80, 0x7FA3
    else:
        one, infinity, nan = (
            int(np.asarray(value, kind).view(BITS[size])) for value in (1, np.inf, np.nan)
        )
    sign = 1 << (8 * size - 1)
    special = np.array([0, sign, 1, sign | 1, infinity, sign | infinity, nan | 3, sign | nan | 5,
                        one, infinity - 1], BITS[size])  # fmt: skip
    bits = np.where(rng.random(shape) < 0.15, rng.choice(special, shape), bits)
    # Values around one, whose sums round in all ways. No term is so large that it absorbs the
    # others.
    near = np.asarray(one, BITS[size]) ^ (bits >> BITS[size](4 if size == 2 else 9))
    bits = np.where(rng.random(shape) < 0.4, near.astype(BITS[size]), bits)
    return bits if kind == "bfloat16" else bits.view(kind)


def widened(x: Array) -> Array:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rounded(x: Array) -> Array:
    """Rounds to bfloat16: to the nearest value, ties to even."""
    w = x.view(np.uint32)
    up = (w + np.uint32(0x7FFF) + ((w >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FC0, up).astype(np.uint16)


def folded(rows: Array, kind: str, op: str) -> Array:
    """Folds the rows in rank order, element by element."""
    with np.errstate(all="ignore"):
        if op in ("min", "max"):
            if kind != "bfloat16":
                return functools.reduce(FOLDS[op], rows)
            best = functools.reduce(FOLDS[op], map(widened, rows))
            return (best.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        if kind.startswith("complex"):
            return folded_complex(rows, op)
        values = widened(rows) if kind == "bfloat16" else rows
        if kind == "float16":
            values = values.astype(np.float32)
        result = functools.reduce(FOLDS[op], values)
        if op == "avg":
            result = result / result.dtype.type(len(rows))
        result = np.where(np.isnan(result), result.dtype.type(np.nan), result)
        return rounded(result) if kind == "bfloat16" else result.astype(rows.dtype)


def folded_complex(rows: Array, op: str) -> Array:
    result = rows[0].copy()
    for x in rows[1:]:
        re, im = result.real.copy(), result.imag.copy()
        if op == "prod":
            result.real, result.imag = re * x.real - im * x.imag, re * x.imag + im * x.real
        else:
            result.real, result.imag = re + x.real, im + x.imag
    parts = result.view(result.real.dtype)
    if op == "avg":
        parts /= parts.dtype.type(len(rows))
    parts[np.isnan(parts)] = np.nan
    return result


def as_elements(x: Array, kind: str) -> Any:
    if kind != "bfloat16":
        return x
    torch = pytest.importorskip("torch")
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def placed(row: Array, kind: str, offset: int, stride: int) -> tuple[Any, Callable[[], bytes]]:
    """Returns the row's elements in memory with this offset and stride, and a function that returns
    their current bytes.
    """
    room = np.zeros(offset + stride * row.size, row.dtype)
    view = room[offset::stride][: row.size]
    view[:] = row
    return as_elements(room, kind)[offset::stride][: row.size], view.tobytes


def cuts(rng: np.random.Generator, count: int, buckets: int) -> list[slice]:
    at = [0, *sorted(rng.integers(0, count, buckets - 1, endpoint=True).tolist()), count]
    return [slice(a, b) for a, b in itertools.pairwise(at)]


@functools.cache
def allowed(op: str, ranks: int, narrow: bool, root: int = 0) -> tuple[str, ...]:
    """Returns the algorithms whose schedules add the contributions in rank order. `trace` finds
    this order in the result of `build`.
    """
    found = []
    for name in algorithms.names(op):
        try:
            flow = trace(algorithms.build(op, name, ranks=ranks, root=root))
        except UnsupportedError:
            continue
        if flow.in_rank_order and (flow.reduce_depth <= 1 or not narrow):
            found.append(name)
    return tuple(found)


# ---- bits depend only on the contributions


@given(data=st.data())
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_bits_depend_on_the_contributions_alone(data: st.DataObject, worlds: World) -> None:
    ranks = data.draw(st.sampled_from(RANKS), "ranks")
    kind, op = (
        data.draw(st.sampled_from(FLOATS), "kind"),
        data.draw(st.sampled_from([*FOLDS]), "op"),
    )
    if kind.startswith("complex") and op in ("min", "max"):
        op = "sum"
    each = data.draw(st.sampled_from([1, 3, 17, 200, 1030, 5000]) | st.integers(0, 400), "each")
    seed = data.draw(st.integers(0, 1 << 30), "seed")
    buckets = data.draw(st.integers(1, 4), "buckets")
    offset, stride = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([1, 1, 3]))
    async_op = data.draw(st.booleans(), "async_op")
    narrow = kind in ("float16", "bfloat16")
    root = seed % ranks
    names = {
        call: data.draw(st.sampled_from([None, *allowed(call, ranks, narrow, root)]), call)
        for call in ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
    }
    rng = np.random.default_rng(seed)
    rows = wild(rng, kind, (ranks, ranks * each))
    pieces = cuts(rng, ranks * each, buckets)
    wanted = folded(rows, kind, op)

    def check(comm: Communicator) -> None:
        def ended(outcome: Any) -> Any:
            return outcome.wait() if async_op else outcome

        me = comm.rank
        x, bits = placed(rows[me], kind, offset, stride)
        how = {"async_op": async_op, "op": op}
        for call in [comm.all_reduce(x[at], algorithm=names["all_reduce"], **how) for at in pieces]:
            ended(call)
        assert bits() == wanted.tobytes(), "all_reduce"
        x, bits = placed(rows[me], kind, offset, stride)
        ended(comm.reduce(x, root, algorithm=names["reduce"], **how))
        assert bits() == (wanted if me == root else rows[me]).tobytes(), "reduce"
        x, _ = placed(rows[me], kind, offset, stride)
        out, bits = placed(np.zeros(each, rows.dtype), kind, offset, 1)
        ended(comm.reduce_scatter(x, out, algorithm=names["reduce_scatter"], **how))
        assert bits() == wanted[me * each : (me + 1) * each].tobytes(), "reduce_scatter"
        if op != "avg":
            for call, below in ((comm.scan, me + 1), (comm.exscan, me)):
                x, bits = placed(rows[me], kind, offset, stride)
                ended(call(x, algorithm=names[call.__name__], **how))
                expected = folded(rows[:below], kind, op) if below > 1 else rows[0]
                assert bits() == expected.tobytes(), call.__name__

    worlds(ranks).run(check)


@given(seed=st.integers(0, 1 << 30), ranks=st.sampled_from(RANKS), kind=st.sampled_from(FLOATS))
@settings(deadline=None, max_examples=15)
def test_factors_and_functions_are_reproducible(
    seed: int, ranks: int, kind: str, worlds: World
) -> None:
    rng = np.random.default_rng(seed)
    kind = "float32" if kind == "bfloat16" else kind
    rows = wild(rng, kind, (ranks, 300))
    pieces = cuts(rng, 300, 3)

    def check(comm: Communicator) -> None:
        for op in (premul_sum(0.3 + comm.rank), premul_sum(0.1j), np.add, "avg"):
            if op == premul_sum(0.1j) and not kind.startswith("complex"):
                continue
            at_once, in_pieces = rows[comm.rank].copy(), rows[comm.rank].copy()
            with np.errstate(all="ignore"):
                comm.all_reduce(at_once, op)
                for at in pieces:
                    comm.all_reduce(in_pieces[at], op)
            if op is not np.add:  # a user's function may change the bits of NaNs
                assert at_once.tobytes() == in_pieces.tobytes()
            np.testing.assert_array_equal(at_once, in_pieces)

    worlds(ranks).run(check)


def test_a_thread_that_flushes_subnormals_gives_the_same_bits(worlds: World) -> None:
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot drop them")
    tiny = np.full(3000, 1e-45, np.float32)

    def check(comm: Communicator) -> None:
        x, y = tiny.copy(), tiny.copy()
        torch.set_flush_denormal(comm.rank == 1)
        try:
            comm.all_reduce(x)
            comm.all_reduce(y, async_op=True).wait()
            mode = float(torch.tensor(1e-45) * 1)
        finally:
            torch.set_flush_denormal(False)
        assert (mode == 0) is (comm.rank == 1), "the thread keeps the mode it had"
        assert set(x.view(np.int32).tolist()) == set(y.view(np.int32).tolist()) == {3}

    worlds(3).run(check)


# ---- algorithms that are allowed


def test_algorithms_that_fold_in_rank_order_are_allowed() -> None:
    found = set(allowed("all_reduce", 4, False))
    assert {"direct", "one_shot"} <= found
    assert not found & {"ring", "recursive_doubling", "halving_doubling", "double_binary_tree"}
    assert {"direct", "reduce_scatter_gather"} <= set(allowed("reduce", 4, True))
    # The chain forwards the fold of the earlier ranks. Recursive doubling adds sums to sums.
    assert "chain" in allowed("scan", 4, False) and "chain" not in allowed("scan", 4, True)
    assert "recursive_doubling" not in allowed("scan", 4, False)
    # an operation without additions
    assert set(allowed("all_gather", 6, True)) >= {"ring", "bruck", "direct"}
    # With two ranks there is only one order.
    assert "ring" in allowed("all_reduce", 2, True)


@pytest.mark.parametrize("name", ["level0:direct@2;level1:direct@2", "hierarchical", "bucket:2x2"])
def test_direct_inside_by_host_is_refused(name: str, worlds: World) -> None:
    assert not folds_in_rank_order(algorithms.build("all_reduce", name, ranks=4))

    def check(comm: Communicator) -> None:
        with pytest.raises(UnsupportedError, match=r"in rank order.* direct, .*one_shot"):
            comm.all_reduce(np.ones(8, np.float32), algorithm=name)

    worlds(4).run(check)


def test_other_algorithms_are_refused_by_name_and_as_schedules(worlds: World) -> None:
    ring = from_json(to_json(algorithms.build("all_reduce", "ring", ranks=3)))
    mine = from_json(to_json(algorithms.build("all_reduce", "one_shot", ranks=3)))
    check(ring)

    def run(comm: Communicator) -> None:
        x = np.arange(12, dtype=np.float32)
        for algorithm in ("ring", ring):
            with pytest.raises(UnsupportedError, match=r"'ring.*reproducible.*direct"):
                comm.all_reduce(x, algorithm=algorithm)
        with pytest.raises(
            UnsupportedError, match=r"scan of 16- and 8-bit floats.*: by_host, direct$"
        ):
            comm.scan(x.astype(np.float16), algorithm="chain")
        assert comm.all_reduce(x, algorithm=mine).tolist() == (np.arange(12) * 3).tolist()
        assert comm.scan(np.ones(1 << 16, np.float16), algorithm="direct")[0] == comm.rank + 1
        assert comm.scan(np.ones(1 << 16, np.float16))[-1] == comm.rank + 1

    worlds(3).run(run)


def test_groups_inherit_reproducible(worlds: World) -> None:
    def check(comm: Communicator) -> None:
        assert comm.reproducible
        parts = comm.split(0, key=-comm.rank), comm.group([0, 1, 2])
        for part in parts:
            assert part is not None and part.reproducible
            with pytest.raises(UnsupportedError, match="reproducible"):
                part.all_reduce(np.ones(3), algorithm="ring")
            part.close()

    worlds(3).run(check)


def test_the_environment_sets_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_REPRODUCIBLE", "1")
    for argument, expected in ((None, True), (True, True), (False, False)):
        with unisono.init(rank=0, size=1, rendezvous=unique_name(), reproducible=argument) as comm:
            assert comm.reproducible is expected


@pytest.mark.parametrize("call", ["all_reduce", "barrier"])
def test_ranks_must_agree_about_reproducible(call: str) -> None:
    name, errors = unique_name(), {}

    def rank(number: int) -> None:
        comm = unisono.init(
            rank=number, size=2, rendezvous=name, timeout_s=20, reproducible=number == 1
        )
        try:
            comm.barrier() if call == "barrier" else comm.all_reduce(np.ones(9))
        except MismatchError as error:
            errors[number] = str(error)
        comm.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(errors) == [0, 1]
    assert all("or in reproducible=" in text for text in errors.values())
