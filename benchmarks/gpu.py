"""Checks and times of the backend on CUDA tensors, with several ranks on one GPU.

    python benchmarks/gpu.py --out results --budget 400

Needs a GPU, torch with CUDA, and Unisono. Each part starts its own ranks, and its results are
written when it ends, so that a run that is cut short keeps what it has. Parts: times beside Gloo,
NCCL and the limit of the device's memory, also over host memory; the host's time by part;
correctness of all operations, element types and world sizes; memory that is freed and allocated
again; faults; training; torch.compile; the commands `unisono bench` and `unisono check`.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import io
import json
import os
import pstats
import socket
import statistics
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from gpu_checks import (
    MIB,
    check_operations,
    communicator,
    compiled,
    expandable,
    fault,
    mixed,
    train,
)
from torch import distributed as dist

HOST_MEMORY = "unisono over host memory"


def start(part: Any, ranks: int, backend: str, limit_s: float, *args: Any) -> list[Any]:
    """Runs `part(rank, ranks, *args)` on new ranks; returns each rank's result or error text."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_rank, args=(part, rank, ranks, backend, port, results, args))
        for rank in range(ranks)
    ]
    for each in processes:
        each.start()
    found: list[Any] = ["no result"] * ranks
    end_s = time.monotonic() + limit_s
    for each in processes:
        each.join(max(0.1, end_s - time.monotonic()))
    for rank, each in enumerate(processes):
        if each.is_alive():
            found[rank] = f"killed after {limit_s} s"
            each.kill()
            each.join()
    while not results.empty():
        rank, result = results.get()
        found[rank] = result
    return found


def _rank(
    part: Any, rank: int, ranks: int, backend: str, port: int, results: Any, args: Any
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # from NCCL 2.30 on: two ranks on one GPU
    if part is expandable:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    torch.cuda.set_device(0)
    if backend == HOST_MEMORY:  # as where ranks cannot open each other's memory
        backend, sys.modules["cuda.bindings.nvrtc"] = "unisono", None  # type: ignore[assignment]
    try:
        dist.init_process_group(
            backend, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=20)
        )
        result: Any = part(rank, ranks, *args)
    except BaseException as error:
        traceback.print_exc(limit=-6)
        result = f"{type(error).__name__}: {error}"
    results.put((rank, result))
    sys.stdout.flush()
    os._exit(0)


def times(rank: int, ranks: int, sizes: list[int], rounds: int) -> dict[str, list[float]]:
    """Returns the microseconds of all_reduce calls, and of x *= c by all ranks at once.

    "host": until the host has made the calls; the device may still work.
    """
    found: dict[str, list[float]] = {}
    for size in sizes:
        x = torch.ones(size // 4, device="cuda")
        for what in ("all_reduce", "limit"):
            call = partial(dist.all_reduce, x) if what == "all_reduce" else partial(x.mul_, 1.0)
            for _ in range(3):
                call()
            rows, hosts = [], []
            for _ in range(rounds):
                torch.cuda.synchronize()
                host = torch.zeros(1)
                dist.all_reduce(host)
                begin_s = time.perf_counter()
                repeats = 5
                for _ in range(repeats):
                    call()
                hosts.append(1e6 * (time.perf_counter() - begin_s) / repeats)
                torch.cuda.synchronize()
                rows.append(1e6 * (time.perf_counter() - begin_s) / repeats)
            found[f"{what} {size}"] = [statistics.median(rows), min(rows), max(rows)]
            found[f"{what} {size}, host"] = [statistics.median(hosts), min(hosts), max(hosts)]
    return found


def profiled(call: Any, turns: int) -> str:
    """Returns the functions in which calls spend most of the host's time."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(turns):
        call()
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(22)
    return text.getvalue()[-4000:]


def host_parts(rank: int, ranks: int) -> dict[str, Any]:
    """Returns the host's microseconds of the parts of an all_reduce of 1 KiB, and a profile."""
    from unisono.torch_backend.device.flat_tensors import flat_target
    from unisono.torch_backend.device.peer_device import Event, Record, Wait
    from unisono.types import DType, ReduceOp

    x = torch.ones(256, device="cuda")
    comm = communicator()
    path, device = comm._path, comm.device
    found: dict[str, Any] = {}

    def measure(what: str, call: Any, turns: int = 200) -> None:
        rows = []
        for _ in range(5):
            torch.cuda.synchronize()
            dist.all_reduce(torch.zeros(1))
            begin_s = time.perf_counter()
            for _ in range(turns):
                call()
            rows.append(1e6 * (time.perf_counter() - begin_s) / turns)
        found[what] = statistics.median(rows)

    measure("dist.all_reduce", partial(dist.all_reduce, x))
    measure("dist.all_reduce, at most 20 under way", partial(dist.all_reduce, x), 20)
    measure("communicator.all_reduce", partial(comm.all_reduce, x, ReduceOp.SUM))
    measure("header exchange", partial(path._comm.all_gather, path._own, path._all))
    measure("find the allocation", partial(device.locate, x))
    measure("flatten", partial(flat_target, x, keeps_values=True))
    measure("current stream", device._handle)
    found["profile of 200 calls"] = profiled(partial(dist.all_reduce, x), 200)
    torch.cuda.synchronize()
    # These numbers of events are larger than those of calls, so no call may follow.
    number = iter(range(1 << 20, 1 << 22))
    record, wait = Record(Event.READY, 0), Wait(rank, Event.READY, 0)
    write, both = device.batch([record], []), device.batch([record], [wait])
    measure("write a flag", lambda: write(next(number)))
    measure("write a flag and wait for it", lambda: both(next(number)))
    allocation, offset = device.locate(x)
    device.open(rank, allocation, device.export(allocation))
    here = device.address(rank, allocation, offset)
    kind = x.nbytes, DType.FLOAT32, ReduceOp.SUM, 1
    measure("launch a kernel", device.prepare([here], [here, here], *kind))
    measure("enqueue a copy", device.prepare([here], [here], *kind))
    return found


def host_path(rank: int, ranks: int) -> dict[str, Any]:
    """Returns the milliseconds of all_reduce of 64 MiB over host memory, and of its two limits: the
    copies between device and host, and the all_reduce of CPU tensors."""
    found: dict[str, Any] = {"explain": communicator().explain()}
    count = 16 * MIB
    x, y = torch.ones(count, device="cuda"), torch.ones(count)
    pinned, small = torch.ones(count, pin_memory=True), torch.ones(MIB, pin_memory=True)
    calls = {
        "all_reduce over host memory": lambda: dist.all_reduce(x),
        "copy down": lambda: pinned.copy_(x, non_blocking=True),
        "copy up": lambda: x.copy_(pinned, non_blocking=True),
        "all_reduce of a CPU tensor": lambda: dist.all_reduce(y),
        "all_reduce of a pinned CPU tensor": lambda: dist.all_reduce(pinned),
        "16 all_reduces of 4 MiB, pinned": lambda: [dist.all_reduce(small) for _ in range(16)],
    }
    rows: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(6):
        for name, call in calls.items():
            torch.cuda.synchronize()
            dist.all_reduce(torch.zeros(1))
            begin_s = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if turn:
                rows[name].append(1e3 * (time.perf_counter() - begin_s))
        x.fill_(1.0)
        y.fill_(1.0)
        pinned.fill_(1.0)
        small.fill_(1.0)
    return found | {name: [statistics.median(r), min(r), max(r)] for name, r in rows.items()}


def command(*words: str) -> list[Any]:
    """Runs a command of unisono; returns its exit code and the end of its output."""
    answer = subprocess.run(
        [sys.executable, "-m", "unisono", *words],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    return [answer.returncode, (answer.stdout + answer.stderr)[-6000:]]


def run_parts(run: Any) -> None:
    """Runs all parts, the most important ones first."""
    sizes = [MIB, 16 * MIB, 64 * MIB, 256 * MIB]
    for turn in range(2):
        for ranks in (2, 4):
            for backend in ("unisono", "gloo")[: 2 - turn]:
                limited = sizes if backend == "unisono" else sizes[:3]
                name = f"times of {backend}, {ranks} ranks, turn {turn}"
                run(name, times, ranks, backend, 60, limited, 7 if backend == "unisono" else 3)
    run("host's time by part, 2 ranks", host_parts, 2, "unisono", 40)
    run("host path and its limits, 2 ranks", host_path, 2, HOST_MEMORY, 40)
    run("operations, 2 ranks", check_operations, 2, "unisono", 60)
    run("fault: killed in a message", fault, 2, "unisono", 30, "killed in a message")
    run("fault: killed in work", fault, 2, "unisono", 30, "killed in work")
    run("operations over host memory, 3 ranks", check_operations, 3, HOST_MEMORY, 60)
    run("memory that cannot be shared, 2 ranks", expandable, 2, "unisono", 30)
    run("times of nccl, 2 ranks", times, 2, "cpu:gloo,cuda:nccl", 30, sizes[:3], 3)
    run("operations, 4 ranks", check_operations, 4, "unisono", 60)
    sweep = ("all_reduce", "--sizes", "1M,64M", "-n", "2", "--rounds", "3", "--time-budget", "15")
    run("unisono bench", command, "bench", *sweep, "--device", "cuda", "--against", "gloo,nccl")
    run("operations, 8 ranks", check_operations, 8, "unisono", 90, True)
    run("losses of one process", train, 1, "gloo", 40, "one")
    run("losses of DDP, 4 ranks", train, 4, "unisono", 40, "ddp")
    run("losses of FSDP and TP, 4 ranks", train, 4, "unisono", 60, "fsdp+tp")
    for kind in ("killed", "mismatch", "late"):
        run(f"fault: {kind}", fault, 2, "unisono", 30, kind)
    run("torch.compile, 2 ranks", compiled, 2, "unisono", 60)
    run("operations, 3 ranks", check_operations, 3, "unisono", 60, True)
    run("unisono check", command, "check", "-n", "2", "--device", "cuda")
    run("cpu:unisono,cuda:nccl", mixed, 1, "cpu:unisono,cuda:nccl", 60)


def main() -> None:
    """Runs all parts in order, as long as the budget lasts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--budget", type=float, default=400.0, help="seconds")
    parser.add_argument("--only", default="", help="run the parts with this text in their names")
    arguments = parser.parse_args()
    begin_s = time.monotonic()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def run(name: str, *job: Any) -> None:
        if arguments.only not in name:
            return
        if time.monotonic() - begin_s > arguments.budget:
            results[name] = "not run: the budget was used"
        else:
            try:
                results[name] = job[0](*job[1:]) if job[0] is command else start(*job)
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"
        (arguments.out / "gpu.json").write_text(json.dumps(results, indent=1))
        text = json.dumps(results[name])
        print(f"[{time.monotonic() - begin_s:6.1f} s] {name}: {text[:900]}", flush=True)

    run_parts(run)


if __name__ == "__main__":
    main()
