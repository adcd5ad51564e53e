"""Failures as a torch user meets them: every survivor learns who and what, fast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PRELUDE = """
import json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import unisono.torch_backend
from unisono import errors
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.FileStore(folder + "/store", size)
dist.init_process_group(
    "unisono", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
)

def report(function):
    started = time.time()
    try:
        function()
        said = {"error": None, "text": ""}
    except Exception as error:
        said = {"error": type(error).__name__, "text": str(error)}
    said["ended"] = time.time()
    said["seconds"] = time.time() - started
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(said, file)

dist.barrier()
"""


def start(body: str, ranks: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + body, str(rank), str(ranks), str(folder)],
            env=environment,
        )
        for rank in range(ranks)
    ]


def reports(processes: list[subprocess.Popen[bytes]], folder: Path) -> dict[int, dict]:
    for process in processes:
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    paths = {rank: folder / f"{rank}.json" for rank in range(len(processes))}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.exists()


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(torch.ones(4 if rank else 5))",
        "dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))",
        "dist.broadcast(torch.ones(4), rank)",
        "(dist.barrier if rank else lambda: dist.all_reduce(torch.ones(4)))()",
        "dist.all_reduce(torch.ones(4), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank])",
        "dist.all_reduce(torch.ones(4 + rank), async_op=True).wait()",
        "dist.all_reduce(torch.ones(4 + rank), async_op=True).get_future().wait()",
    ],
)
def test_mismatch_raises_on_every_rank(call, tmp_path):
    said = reports(start(f"report(lambda: {call})", 2, tmp_path), tmp_path)
    assert {rank: entry["error"] for rank, entry in said.items()} == {
        0: "MismatchError",
        1: "MismatchError",
    }
    assert all(entry["seconds"] < 1.0 for entry in said.values())


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(torch.ones(4))",
        "dist.all_reduce(torch.ones(4), async_op=True).wait()",
        "dist.recv(torch.ones(4), 2)",
    ],
)
def test_killed_rank_is_named_by_every_survivor(call, tmp_path):
    body = f"""
if rank == 2:
    open(folder + "/ready", "w").close()
    time.sleep(60)
report(lambda: {call})
"""
    processes = start(body, 3, tmp_path)
    wait_for(tmp_path / "ready")
    time.sleep(0.5)
    processes[2].send_signal(signal.SIGKILL)
    killed = time.time()
    said = reports(processes, tmp_path)
    assert set(said) == {0, 1}
    for entry in said.values():
        assert entry["error"] == "PeerLostError"
        assert "2" in entry["text"]
        assert entry["ended"] - killed < 1.0


def test_killed_rank_is_named_through_ddp(tmp_path):
    body = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
if rank == 1:
    open(folder + "/ready", "w").close()
    time.sleep(60)
report(lambda: model(torch.ones(2, 4)).sum().backward())
"""
    processes = start(body, 2, tmp_path)
    wait_for(tmp_path / "ready")
    time.sleep(0.5)
    processes[1].send_signal(signal.SIGKILL)
    killed = time.time()
    said = reports(processes, tmp_path)
    assert "PeerLostError" in said[0]["error"] + said[0]["text"]
    assert said[0]["ended"] - killed < 1.0


def test_late_rank_is_named_by_the_timeout(tmp_path):
    body = """
dist.group.WORLD.set_timeout(timedelta(seconds=1))
if rank == 1:
    time.sleep(3)
    sys.exit()
report(lambda: dist.all_reduce(torch.ones(4)))
"""
    said = reports(start(body, 2, tmp_path), tmp_path)
    assert said[0]["error"] == "CollectiveTimeoutError"
    assert "1" in said[0]["text"]


def test_abort_ends_calls_under_way(tmp_path):
    body = """
if rank == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    dist.distributed_c10d._abort_process_group()
    report(work.wait)
else:
    report(lambda: dist.all_reduce(torch.ones(4)) or dist.barrier())
"""
    said = reports(start(body, 2, tmp_path), tmp_path)
    assert said[0]["error"] in (None, "AbortedError")  # None: it was done before the abort
    assert said[1]["error"] in ("AbortedError", "PeerLostError")


def test_failed_group_refuses_work_and_can_be_replaced(tmp_path):
    body = """
try:
    dist.all_reduce(torch.ones(4 + rank))
except errors.MismatchError:
    pass
try:
    dist.barrier()
except errors.UnisonoError:
    pass
else:
    raise AssertionError("a failed group took more work")
dist.destroy_process_group()
dist.init_process_group("unisono", store=dist.PrefixStore("again", store), rank=rank,
                        world_size=size)
report(dist.barrier)
dist.destroy_process_group()
"""
    said = reports(start(body, 2, tmp_path), tmp_path)
    assert {rank: entry["error"] for rank, entry in said.items()} == {0: None, 1: None}
