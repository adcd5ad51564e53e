"""Collectives and messages of the C interface give NumPy's results and clear errors, also beside
calls from Python."""

from __future__ import annotations

import ctypes
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from ctypes import byref, c_int32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unisono
from cases_in_turn import turn
from communicator.c_functions import ANY_TAG, NAMES, Api, CGroup, Failed, message
from communicator.test_collectives import numbers, reduced, same
from communicator.test_messages_hosts import on_hosts
from ranks import Me, Processes, Threads
from time_limits import limit_s
from unisono import Communicator

World = Callable[[int], Threads]
LENGTHS = [0, 1, 1000, 300_001]


def test_table_is_that_of_the_header():
    with Threads(1) as world:
        group = CGroup.of(world.comms[0])
        assert group.api.size == ctypes.sizeof(Api)
        assert group.api.version == 1
        assert (group.api.rank(group.pointer), group.api.ranks(group.pointer)) == (0, 1)


def check_everywhere(comm: Communicator, group: CGroup, rows: Any, op: str) -> None:
    n, count, me = comm.size, rows.shape[1], comm.rank
    expected = reduced(rows, op.lower())
    out = np.zeros(count, rows.dtype)
    x = rows[me].copy()
    group.run("ALL_REDUCE", x, out, count, reduction=op)
    same(out, expected)
    same(x, rows[me])
    group.run("ALL_REDUCE", x, x, count, reduction=op)
    same(x, expected)
    for root in {0, n - 1}:
        out = np.zeros(count, rows.dtype)
        target = out if me == root else None
        group.run("REDUCE", rows[me], target, count, reduction=op, root=root)
        same(out, expected if me == root else np.zeros(count, rows.dtype))
    wide = np.concatenate([np.roll(rows, -d, axis=0) for d in range(n)], axis=1)
    group.run("REDUCE_SCATTER", wide[me].copy(), out, count, reduction=op)
    same(out, reduced(wide, op.lower())[me * count : (me + 1) * count])
    place = wide[me].copy()
    group.run("REDUCE_SCATTER", place, place[me * count : (me + 1) * count], count, reduction=op)
    same(place[me * count : (me + 1) * count], out)


def check_moves(comm: Communicator, group: CGroup, rows: Any) -> None:
    n, count, me = comm.size, rows.shape[1], comm.rank
    whole = np.zeros(n * count, rows.dtype)
    group.run("ALL_GATHER", rows[me].copy(), whole, count)
    same(whole, rows.reshape(-1))
    whole[:] = 0
    whole[me * count : (me + 1) * count] = rows[me]
    group.run("ALL_GATHER", whole[me * count : (me + 1) * count], whole, count)
    same(whole, rows.reshape(-1))
    x = np.concatenate([rows[(me * 3 + d) % n] for d in range(n)])
    group.run("ALL_TO_ALL", x, whole, count)
    same(whole, np.concatenate([rows[(s * 3 + me) % n] for s in range(n)]))
    for root in {0, n - 1}:
        out, is_root = np.zeros(count, rows.dtype), me == root
        group.run(
            "BROADCAST", rows[me] if is_root else None, None if is_root else out, count, root=root
        )
        same(rows[me] if is_root else out, rows[root])
        whole = np.zeros(n * count, rows.dtype)
        group.run("GATHER", rows[me].copy(), whole if is_root else None, count, root=root)
        same(whole, rows.reshape(-1) if is_root else np.zeros(n * count, rows.dtype))
        every = rows.reshape(-1).copy() if is_root else None
        group.run("SCATTER", every, out, count, root=root)
        same(out, rows[me])
    out = np.zeros(count, rows.dtype)
    group.run("SCAN", rows[me].copy(), out, count)
    same(out, reduced(rows[: me + 1], "sum"))
    out = np.full(count, 9, rows.dtype)
    group.run("EXSCAN", rows[me].copy(), out, count)
    same(out, reduced(rows[:me], "sum") if me else np.full(count, 9, rows.dtype))
    group.run("BARRIER", None, None, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_collectives(threads: World, ranks: int):
    world = threads(ranks)

    def body(comm: Communicator) -> None:
        group = CGroup.of(comm)
        for count in LENGTHS:
            for dtype in ("float32", "float16", "int64", "complex128", "bool"):
                rows = numbers(np.dtype(dtype), ranks, count)
                with turn(count=count, dtype=dtype):
                    check_everywhere(comm, group, rows, "LOR" if dtype == "bool" else "SUM")
                    if dtype != "bool":
                        check_moves(comm, group, rows)
                    x = np.ones(3)  # calls from Python and from C may alternate
                    assert comm.all_reduce(x).tolist() == [ranks] * 3

    world.run(body)


def test_sums_of_float16_round_once(threads: World):
    """Sums of 5 ranks in the order of a tree would round more than once."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 70_001)).astype(np.float16)

    def body(comm: Communicator) -> None:
        out = np.empty(rows.shape[1], np.float16)
        CGroup.of(comm).run("ALL_REDUCE", rows[comm.rank].copy(), out, out.size)
        expected = np.zeros(rows.shape[1], np.float32)
        for row in rows.astype(np.float32):
            expected += row
        np.testing.assert_allclose(out, expected.astype(np.float16), rtol=2**-10, atol=1e-6)

    threads(5).run(body)


def test_requests(threads: World):
    def body(comm: Communicator) -> None:
        group, n, me = CGroup.of(comm), comm.size, comm.rank
        x, out = np.full(1000, me + 1.0), np.zeros(1000)
        with group.prepared("ALL_REDUCE", "float64", 1000) as call:
            first = group.begun("begin", call, x.ctypes.data, out.ctypes.data, 30.0)
            second = group.begun("begin", call, x.ctypes.data, x.ctypes.data, 30.0)
            group.call("wait", second, -1.0)
            group.call("wait", first, -1.0)
        assert out[0] == x[0] == n * (n + 1) / 2
        for count in (1, 100_000):
            sent, got = np.full(count, me), np.zeros(count, np.int64)
            incoming = group.begun(
                "begin_receive", group.pointer, message(got, (me - 1) % n, 7), 30.0
            )
            outgoing = group.begun(
                "begin_send", group.pointer, message(sent, (me + 1) % n, 7), 30.0
            )
            group.call("wait", outgoing, -1.0)
            while True:
                try:
                    group.call("test", incoming)
                    break
                except Failed as failed:
                    assert failed.status == NAMES["PENDING"]
            assert (got == (me - 1) % n).all()

    threads(3).run(body)


def test_messages_have_a_source_and_a_tag(threads: World):
    def body(comm: Communicator) -> None:
        group, x = CGroup.of(comm), np.zeros(4, np.float32)
        if comm.rank:
            x += comm.rank
            group.call("send", group.pointer, message(x, 0, 40 + comm.rank), 30.0)
            return
        found = {}
        for _ in range(comm.size - 1):
            source, tag = c_int32(), c_uint64()
            into = message(x, -1, ANY_TAG)
            group.call("receive", group.pointer, into, 30.0, byref(source), byref(tag))
            found[source.value] = (tag.value, x[0])
        assert found == {rank: (40 + rank, rank) for rank in range(1, comm.size)}

    threads(3).run(body)


def test_split(threads: World):
    def body(comm: Communicator) -> None:
        group, part = CGroup.of(comm), c_void_p()
        color = -1 if comm.rank == 2 else 0
        group.call("split", group.pointer, color, -comm.rank, byref(part))
        if color < 0:
            assert part.value is None
            return
        assert part.value is not None
        inner = CGroup(part.value)
        assert inner.api.ranks(part) == comm.size - 1
        assert inner.api.rank(part) == [3, 2, None, 1, 0][comm.rank]
        out = np.empty(1)
        inner.run("ALL_REDUCE", np.ones(1), out, 1)
        assert out[0] == comm.size - 1
        inner.api.retain(part)
        inner.api.release(part)
        inner.api.release(part)

    threads(5).run(body)


def on_several_hosts(comm: Communicator) -> str:
    group, n, me = CGroup.of(comm), comm.size, comm.rank
    for count in (1, 70_001):
        rows = numbers(np.dtype("float32"), n, count)
        check_everywhere(comm, group, rows, "SUM")
        check_moves(comm, group, rows)
    for count in (1, 70_001):
        x, y = np.full(count, me), np.zeros(count, np.int64)
        for source in ((me - 1) % n, -1):
            incoming = group.begun("begin_receive", group.pointer, message(y, source, 3), 30.0)
            group.call("send", group.pointer, message(x, (me + 1) % n, 3), 30.0)
            group.call("wait", incoming, -1.0)
            assert (y == (me - 1) % n).all()
            comm.barrier()  # a receive from any rank would take the next message
    part = c_void_p()
    group.call("split", group.pointer, me % 2, 0, byref(part))
    inner = CGroup(part.value or 0)
    inner.run("BARRIER", None, None, 0)
    inner.api.release(part)
    return "right"


def test_several_hosts():
    for hosts in [(0, 0, 1), (0, 1, 2)]:
        assert on_hosts(on_several_hosts, hosts) == ["right"] * 3


@pytest.mark.parametrize(
    ("op", "dtype", "count", "options", "status", "text"),
    [
        ("ALL_REDUCE", "none", 1, {}, "INVALID", "dtype: expected a type of unisono.h, got 99"),
        ("PENDING", "int8", 1, {}, "INVALID", "op: expected an operation of unisono.h, got 100"),
        ("ALL_REDUCE", "int8", 1, {"reduction": "none"}, "INVALID", "reduction: expected a"),
        ("ALL_REDUCE", "bool", 1, {"reduction": "AVG"}, "UNSUPPORTED", "bool does not support avg"),
        ("BROADCAST", "int8", 1, {"root": 2}, "INVALID", "root 2 is not one of the 2 ranks"),
        ("ALL_GATHER", "float64", 1 << 60, {}, "INVALID", "count: expected fewer elements"),
    ],
)
def test_refusals_of_prepare(
    threads: World, op: str, dtype: str, count: int, options: Any, status: str, text: str
):
    def body(comm: Communicator) -> None:
        group = CGroup.of(comm)
        with (
            pytest.raises(Failed, match=text) as raised,
            group.prepared(op, dtype, count, **options),
        ):
            pass
        assert raised.value.status == NAMES[status]
        assert comm.all_reduce(np.ones(1))[0] == comm.size  # the group still works

    threads(2).run(body)


def test_refusals_of_run(threads: World):
    def body(comm: Communicator) -> None:
        group, x = CGroup.of(comm), np.zeros(10)
        with group.prepared("ALL_REDUCE", "float64", 5) as call:
            for args, text in (
                ((None, x.ctypes.data, 1.0), "all_reduce: expected memory, got NULL for in"),
                ((x.ctypes.data, None, 1.0), "all_reduce: expected memory, got NULL for out"),
                ((x.ctypes.data, x[1:].ctypes.data, 1.0), "in and out overlap"),
                ((x.ctypes.data, x.ctypes.data, 0.0), "timeout_s: expected more than 0 seconds"),
                ((x.ctypes.data, x.ctypes.data, float("nan")), "timeout_s: expected more than 0"),
            ):
                with pytest.raises(Failed, match=text) as raised:
                    group.call("run", call, *args)
                assert raised.value.status == NAMES["INVALID"]
        for peer, tag, text in (
            (2, 0, "peer: expected a rank below 2, got 2"),
            (-2, 0, "peer: expected a rank below 2, got -2"),
            (-1, 0, "a send needs a rank, got UNISONO_ANY_SOURCE"),
            (0, 1 << 63, "tag: expected a number below 2"),
        ):
            with pytest.raises(Failed, match=text):
                group.call("send", group.pointer, message(x, peer, tag), 1.0)
        assert comm.all_reduce(np.ones(1))[0] == comm.size

    threads(2).run(body)


def test_a_mismatch_names_both_calls(threads: World):
    def body(comm: Communicator) -> str:
        group, x = CGroup.of(comm), np.zeros(8)
        with pytest.raises(Failed) as raised:
            group.run("ALL_REDUCE", x, x, 7 + comm.rank)
        assert raised.value.status == NAMES["MISMATCH"]
        return str(raised.value)

    for text in threads(2).outcomes(body):
        assert "float64[7]" in text and "float64[8]" in text


def test_closed_and_aborted_groups(threads: World):
    def closed(comm: Communicator) -> None:
        group = CGroup.of(comm)
        with group.prepared("BARRIER", "int8", 0) as call:
            comm.close()
            with pytest.raises(Failed) as raised:
                group.call("run", call, None, None, 1.0)
            assert raised.value.status == NAMES["ABORTED"]
        with pytest.raises(Failed, match="this communicator is closed"):
            group.run("BARRIER", None, None, 0)

    def aborted(comm: Communicator) -> None:
        group = CGroup.of(comm)
        if comm.rank:
            group.api.abort(group.pointer, b"no more data")
        with pytest.raises(Failed, match="rank 1: no more data") as raised:
            group.run("BARRIER", None, None, 0)
        assert raised.value.status == NAMES["ABORTED"]

    with Threads(2) as world:
        world.run(closed)
    threads(2).outcomes(aborted)


def killed(me: Me) -> None:
    comm = me.join()
    group, x = CGroup.of(comm), np.zeros(1)
    group.run("ALL_REDUCE", x, x, 1)
    me.say("ready")
    if me.rank == 1:
        time.sleep(60)
    me.attempt("raised", group.run, "ALL_REDUCE", x, x, 1)


def test_a_killed_rank_is_named_within_a_second():
    with Processes(killed, 3) as ranks:
        ranks.wait_for("ready", range(3))
        since = ranks.signal(1, signal.SIGKILL)
        for said in ranks.wait_for("raised", [0, 2]):
            assert said["error"] == "Failed"
            assert "rank 1" in said["text"]
            assert said["at"] - since < limit_s(3.0)


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_page_compiles(tmp_path: Path, language: str):
    page = (Path(__file__).parents[2] / "docs" / "c.md").read_text()
    (program,) = re.findall(r"```c\n(.*?)```", page, re.DOTALL)
    compiler = "gcc" if language == "c" else "g++"
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    standard = "c99" if language == "c" else "c++17"
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-std={standard}"]
    source = tmp_path / "program"
    source.write_text(program)
    command = [compiler, *flags, f"-I{unisono.get_include()}", "-x", language, str(source)]
    subprocess.run(command, check=True)
