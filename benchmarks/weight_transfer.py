"""Weights from a trainer to workers, beside Gloo: `python benchmarks/weight_transfer.py`.

The trainer and its workers are processes that have both: a `WeightSender` with its receivers, and a
group of Gloo in which the trainer broadcasts each tensor, as programs do. Both take turns. Workers
verify every element of every update. `copy` is the limit on one host: all workers copy the weights
at once. With root, two hosts of a lab are measured too, where the limit is the link.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import distributed as dist

from unisono.bench.lab import Lab, reason_unavailable
from unisono.weight_transfer import WeightReceiver, WeightSender

HERE = Path(__file__).parent
LINK_GBIT = 4
PORT = 29_871

Command = Callable[[int, Sequence[str]], list[str]]
"""Returns the words that run a command for a worker (0: the trainer)."""


def make_weights(gib: float) -> dict[str, torch.Tensor]:
    """Returns tensors like those of a transformer in bfloat16: matrices, and small vectors."""
    found: dict[str, torch.Tensor] = {}
    blocks = max(round(gib * 2**30 / (12 * 2048 * 2048 * 2)), 1)
    for block in range(blocks):
        for part, rows in (("qkv", 3), ("out", 1), ("up", 4), ("down", 4)):
            found[f"{block}.{part}"] = torch.empty(rows * 2048, 2048, dtype=torch.bfloat16)
        for part in ("norm1", "norm2", "bias"):
            found[f"{block}.{part}"] = torch.empty(2048, dtype=torch.bfloat16)
    return found


def fill(weights: dict[str, torch.Tensor], turn: int) -> None:
    """Gives each tensor values that depend on the turn."""
    for number, each in enumerate(weights.values()):
        each.fill_((turn * 37 + number) % 251)


def verify(weights: dict[str, torch.Tensor], turn: int) -> None:
    """Raises `AssertionError` unless every element is that of `fill`."""
    for number, (name, each) in enumerate(weights.items()):
        assert bool((each == (turn * 37 + number) % 251).all()), (turn, name)


def order(turn: int) -> tuple[str, str]:
    """Returns which of the two comes first in a turn."""
    return ("unisono", "gloo") if turn % 2 else ("gloo", "unisono")


def join_gloo(rank: int, options: dict[str, Any]) -> None:
    """Joins the group of Gloo, the trainer as rank 0."""
    torch.set_num_threads(1)
    size, host = options["workers"] + 1, options["host"]
    store = dist.TCPStore(host, PORT, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def broadcast(weights: dict[str, torch.Tensor]) -> float:
    """Broadcasts each tensor with Gloo; returns the seconds until all have all."""
    dist.barrier()
    begin_s = time.perf_counter()
    for each in weights.values():
        dist.broadcast(each, 0)
    dist.barrier()
    return time.perf_counter() - begin_s


def trainer(options: dict[str, Any]) -> None:
    """Prints the sender's address, then the times of all turns as JSON."""
    weights = make_weights(options["gib"])
    times: dict[str, list[float]] = {"unisono": [], "gloo": [], "copy": []}
    with WeightSender(timeout_s=120.0) as sender:
        print(sender.address, flush=True)
        join_gloo(0, options)
        fill(weights, 0)
        sender.send(weights, workers=options["workers"])  # makes the group, and touches the memory
        for turn in range(1, options["turns"] + 1):
            for which in order(turn):
                fill(weights, turn)
                if which == "gloo":
                    times["gloo"].append(broadcast(weights))
                    continue
                update = sender.send(weights, workers=options["workers"])
                assert not update.failed, update.failed
                times["unisono"].append(update.seconds)
            times["copy"].append(_slowest(0.0))
    nbytes = sum(each.nbytes for each in weights.values())
    print(json.dumps({"nbytes": nbytes, "tensors": len(weights), "times_s": times}), flush=True)


def worker(address: str, rank: int, options: dict[str, Any]) -> None:
    """Receives and verifies all updates."""
    receiver = WeightReceiver(address)
    join_gloo(rank, options)
    weights = make_weights(options["gib"])
    copies = {name: torch.zeros_like(each) for name, each in weights.items()}
    receiver.receive(weights)
    for turn in range(1, options["turns"] + 1):
        for which in order(turn):
            for each in weights.values():
                each.zero_()
            if which == "gloo":
                broadcast(weights)
            else:
                receiver.receive(weights)
            verify(weights, turn)
        dist.barrier()
        begin_s = time.perf_counter()
        for name, each in weights.items():
            copies[name].copy_(each)
        _slowest(time.perf_counter() - begin_s)


def _slowest(seconds: float) -> float:
    """Returns the longest time of all workers. The trainer, which copies nothing, gives 0."""
    if dist.get_rank() == 0:
        dist.barrier()
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def compare(command: Command, options: dict[str, Any]) -> dict[str, Any]:
    """Runs the trainer and its workers; returns the times of all turns."""
    with ExitStack() as stack:
        started = stack.enter_context(_program(command(0, ["trainer", json.dumps(options)])))
        assert started.stdout is not None
        address = started.stdout.readline().strip()
        for rank in range(1, options["workers"] + 1):
            words = ["worker", json.dumps(options), address, str(rank)]
            stack.enter_context(_program(command(rank, words)))
        said = started.stdout.readline()
        if not said:
            raise SystemExit("the trainer has failed")
        return {"workers": options["workers"], **json.loads(said)}


@contextmanager
def _program(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
            started.wait(60)
        finally:
            started.kill()


def changes(gib: float, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of updates to two workers: with the same workers, with one that has
    joined since, and with one that is killed in the update."""
    found: dict[str, list[float]] = {"same": [], "joined": [], "killed": []}
    weights = make_weights(gib)
    fill(weights, 1)
    with WeightSender(timeout_s=120.0) as sender, ExitStack() as stack:
        words = [sys.executable, __file__, "follow", "{}", sender.address]
        stays = stack.enter_context(subprocess.Popen(words))
        stack.callback(stays.kill)
        sender.send(weights)
        for turn in range(repeats):
            with subprocess.Popen(words) as other:
                found["joined"].append(sender.send(weights, workers=2).seconds)
                found["same"].append(sender.send(weights, workers=2).seconds)
                # at a different time of the update in each turn
                delay_s = found["same"][-1] * (turn + 0.5) / repeats
                killer = subprocess.Popen(["sh", "-c", f"sleep {delay_s}; kill -9 {other.pid}"])
                update = sender.send(weights, workers=2)
                killer.wait()
                found["killed"].append(update.seconds)
    return found


def follow(address: str) -> None:
    """Receives updates until the sender closes."""
    torch.set_num_threads(1)
    receiver, weights = WeightReceiver(address), None
    while (weights := receiver.receive(weights)) is not None:
        pass


def measure(
    *,
    gib: Annotated[float, typer.Option(help="GiB of weights.")] = 1.0,
    turns: Annotated[int, typer.Option(help="Updates of each library.")] = 7,
    json_path: Annotated[Path, typer.Option("--json", help="File for the results.")] = HERE
    / "results"
    / "weight-transfer.json",
) -> None:
    """Measures updates on one host, with workers that come and go, and between two hosts."""
    document: dict[str, Any] = {"date": f"{datetime.now():%Y-%m-%d}", "turns": turns, "host": []}
    for workers in (1, 2, 3):
        options = {"workers": workers, "gib": gib, "turns": turns, "host": "127.0.0.1"}
        document["host"].append(compare(_here, options))
        _tell(document["host"][-1])
    document["changes_s"] = changes(gib, turns)
    print({name: round(median(each), 3) for name, each in document["changes_s"].items()})
    reason = reason_unavailable()
    if reason is None:
        with Lab(hosts=2, rate=f"{LINK_GBIT}gbit") as lab:
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

            def there(rank: int, words: Sequence[str]) -> list[str]:
                return lab.command(min(rank, 1), _here(rank, words))

            options = {"workers": 1, "gib": gib, "turns": turns, "host": lab.address(0)}
            document["link"] = {"gbit": LINK_GBIT, **compare(there, options)}
            _tell(document["link"])
    else:
        print(f"not between two hosts: {reason}")
    json_path.write_text(json.dumps(document, indent=1) + "\n")


def _here(_: int, words: Sequence[str]) -> list[str]:
    return [sys.executable, __file__, *words]


def _tell(found: dict[str, Any]) -> None:
    rates = {
        name: f"{found['nbytes'] / median(each) / 1e9:.2f} GB/s"
        for name, each in found["times_s"].items()
    }
    print(found["workers"], "workers:", rates, flush=True)


if __name__ == "__main__":
    role = sys.argv[1] if len(sys.argv) > 1 else ""
    if role == "trainer":
        trainer(json.loads(sys.argv[2]))
    elif role == "worker":
        worker(sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[2]))
    elif role == "follow":
        follow(sys.argv[3])
    else:
        typer.run(measure)
