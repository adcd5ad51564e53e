"""The program of one rank of one contestant. `contestant_ranks` starts it and sends commands to
it."""

from __future__ import annotations

import argparse
import importlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unisono.bench.barrier import StartLine
from unisono.bench.cases import Case
from unisono.bench.contestants import (
    KERNELS,
    MEMORY,
    NCCL,
    OURS,
    SHARED,
    STREAMING,
    Contestant,
)
from unisono.bench.expected_results import allocate, count_wrong
from unisono.bench.peers.base import Array, Peer, Repeat
from unisono.bench.rank_messages import Message, RankConnection
from unisono.errors import UnsupportedError


class Worker:
    """The state that a rank keeps from one command to the next: the driver of the library and the
    current case."""

    def __init__(self, peer: Peer, start_line: StartLine) -> None:
        self._peer = peer
        self._start_line = start_line
        self._case: Case
        self._repeat: Repeat
        self._x: Array
        self._out: Array

    def answer(self, message: Message) -> Message:
        match message["do"]:
            case "bind":
                return self._bind(Case(**message["case"]))
            case "choose":
                return self._choose(str(message["algorithm"]))
            case "verify":
                return self._verify()
            case "time":
                return self._time(int(message["iterations"]))
            case "time rewritten":
                return self._time_rewritten(int(message["iterations"]))
        raise ValueError(f"unknown command {message['do']!r}")

    def _bind(self, case: Case) -> Message:
        self._case = case
        if self._peer.moves_data:
            self._x, self._out = allocate(case, self._peer.rank, self._peer.empty)
        else:
            self._x = self._out = np.empty(0, case.storage)
        self._repeat = self._peer.repeat(case, self._x, self._out)
        return {}

    def _choose(self, algorithm: str) -> Message:
        self._repeat = self._peer.choose(algorithm).repeat(self._case, self._x, self._out)
        self._repeat(1)  # raises an error now if the library does not support the algorithm
        return {}

    def _verify(self) -> Message:
        """Verifies one call. Then fills x with zeros, because sums of zeros stay finite after any
        number of timed calls."""
        if not self._peer.moves_data:
            self._repeat(1)
            return {"wrong": 0}
        call = partial(self._peer.with_arrays, partial(self._repeat, 1))
        wrong = count_wrong(self._case, self._peer.rank, self._x, self._out, call)
        self._x.fill(0)
        self._peer.load()
        return {"wrong": wrong}

    def _time(self, iterations: int) -> Message:
        repeat = self._repeat
        repeat(1 + iterations // 10)
        self._peer.finish()
        self._start_line.wait()
        start_s = time.perf_counter()
        repeat(iterations)
        self._peer.finish()
        return {"elapsed_s": time.perf_counter() - start_s, "began_s": start_s}

    def _time_rewritten(self, iterations: int) -> Message:
        """Times calls one by one. Before each, every rank writes its input again."""
        repeat, peer = self._repeat, self._peer
        times_s = []
        for _ in range(1 + iterations):  # the first call is a warm-up
            peer.rewrite(self._x)
            self._start_line.wait()
            began_s = time.perf_counter()
            repeat(1)
            peer.finish()
            times_s.append((began_s, time.perf_counter()))
        return {"times_s": times_s[1:]}


def connect_peer(contestant: Contestant, *, rank: int, ranks: int, rendezvous: str) -> Peer:
    """Returns the driver of a contestant. The contestant's ranks find each other at `rendezvous`, a
    URL.

    Imports only the library of this contestant.
    """
    options: dict[str, Any] = {"rank": rank, "ranks": ranks}
    if contestant.base == MEMORY and contestant.device:
        options = {"rank": rank, "device": contestant.device}
        module, name = "device_memory", "DeviceMemoryPeer"
    elif contestant.base == MEMORY:
        module, name, options = "memory", "MemoryPeer", {"rank": rank}
    elif contestant.base in (KERNELS, STREAMING):
        module, name = "kernels", "KernelsPeer"
        options = {"rank": rank, "streaming": contestant.base == STREAMING}
    elif contestant.is_native:
        module, name = "unisono_communicator", "NativePeer"
        options |= {"rendezvous": rendezvous, "algorithm": contestant.algorithm}
        options["shared"] = contestant.base == SHARED
    elif contestant.base in ("gloo", NCCL, OURS["torch"]):
        module, name = "torch_distributed", "TorchPeer"
        backend = "unisono" if contestant.base == OURS["torch"] else contestant.base
        options |= {"backend": backend, "rendezvous": rendezvous, "device": contestant.device}
    else:
        module, name, options = "mpi", "MpiPeer", {}
    driver = importlib.import_module(f"unisono.bench.peers.{module}")
    peer: Peer = getattr(driver, name)(**options)
    return peer


def bind_to_core(rank: int) -> None:
    """Binds this thread to one core. Call this after the library has started, so that the library
    sees all cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def serve(channel: RankConnection, worker: Worker) -> None:
    """Answers commands until the command "quit". Raises EOFError if the benchmark has ended."""
    while (message := channel.receive())["do"] != "quit":
        try:
            reply = worker.answer(message)
        except UnsupportedError as error:
            reply = {"error": str(error)}
        except Exception as error:
            # Any error of a library is reported as the result of this contestant.
            reply = {"error": f"{type(error).__name__}: {error}"}
        channel.send(reply)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int, default=-1, help="rank; by default the library's own")
    parser.add_argument("--rendezvous", help="rendezvous of the ranks; by default a file")
    parser.add_argument("--device", default="", help="device of the tensors; by default none")
    parser.add_argument("--bind", action="store_true", help="stay on core rank mod cores")
    arguments = parser.parse_args()
    folder, ranks = arguments.folder, arguments.ranks
    channel = RankConnection.connect(folder / "socket")
    rendezvous = arguments.rendezvous or f"file://{folder / 'store'}"
    contestant = Contestant(name=arguments.contestant, device=arguments.device)
    peer = connect_peer(contestant, rank=arguments.rank, ranks=ranks, rendezvous=rendezvous)
    if arguments.bind:
        bind_to_core(peer.rank)
    start_line = StartLine(folder / "start_line", rank=peer.rank, ranks=ranks)
    channel.send({"rank": peer.rank})
    serve(channel, Worker(peer, start_line))
    peer.close()


if __name__ == "__main__":
    main()
