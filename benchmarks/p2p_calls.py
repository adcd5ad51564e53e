"""Measures the time that an asynchronous send or receive of 8 bytes costs its caller.

The same call is made through three interfaces: the native interface, torch's process group, which
is the part that a backend controls, and `torch.distributed`, which adds checks and wrappers. Calls
to torch's backend "fake" do nothing. They take the time that torch itself needs, which no backend
can avoid.

The receiver starts only after all messages of a burst have arrived, so neither rank waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import unisono

BURST = 32
"""Number of messages that a pair can buffer, so that all are sent at once."""
ELEMENTS = 2
Call = Callable[[Any], Any]


def measure(*, rounds: int) -> dict[str, Any]:
    """Measures the seconds per call of each kind."""
    sent, received = unisono.run(_rank, ranks=2, args=(rounds,))
    rows = [
        {"api": api, "call": call, "times_s": times_s, "wrong": 0 if right else 1}
        for api in sent
        for call, (times_s, right) in (("send", sent[api]), ("receive", received[api]))
    ]
    floor = [
        {"api": api, "call": call, "times_s": times_s}
        for (api, call), times_s in unisono.run(_fake_rank, ranks=1, args=(rounds,))[0].items()
    ]
    return {"burst": BURST, "rows": rows, "floor": floor}


# ---- code that runs on each rank


def _rank(rounds: int) -> dict[str, tuple[list[float], bool]]:
    """Returns, by interface, the seconds per call in each round, and True if the messages were
    correct.
    """
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    with unisono.init() as comm:
        me, peer = comm.rank, 1 - comm.rank
        arrays = [np.full(ELEMENTS, number, np.int32) for number in range(BURST)]
        tensors = [torch.full((ELEMENTS,), number, dtype=torch.int32) for number in range(BURST)]
        group: Any = dist.group.WORLD
        kinds: dict[str, tuple[Call, Call, list[Any]]] = {
            "native": (
                lambda x: comm.send(x, peer, async_op=True),
                lambda x: comm.recv(x, peer, async_op=True),
                arrays,
            ),
            "torch's group": (
                lambda x: group.send([x], peer, 0),
                lambda x: group.recv([x], peer, 0),
                tensors,
            ),
            "torch": (lambda x: dist.isend(x, peer), lambda x: dist.irecv(x, peer), tensors),
        }
        found = {
            api: _bursts(comm, calls[me], memories, rounds)
            for api, (*calls, memories) in kinds.items()
        }
    dist.destroy_process_group()
    return found


def _bursts(
    comm: unisono.Communicator, call: Call, memories: list[Any], rounds: int
) -> tuple[list[float], bool]:
    times_s, right = [], True
    for round_ in range(rounds + 1):  # the first round is a warm-up
        if comm.rank == 1:
            for memory in memories:
                memory[:] = -1
            comm.barrier()  # all messages have been sent
        began = time.perf_counter()
        works = [call(memory) for memory in memories]
        took_s = (time.perf_counter() - began) / BURST
        if comm.rank == 0:
            comm.barrier()
        for work in works:
            work.wait()
        del works, work  # frees the handles before the next burst
        comm.barrier()
        if round_ > 0:
            times_s.append(took_s)
        right &= all(bool((memory == number).all()) for number, memory in enumerate(memories))
    return times_s, right


def _fake_rank(rounds: int) -> dict[tuple[str, str], list[float]]:
    """Returns the seconds per call of a backend that does nothing, by interface and call."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    group: Any = dist.group.WORLD
    calls: dict[tuple[str, str], Call] = {
        ("torch's group", "send"): lambda x: group.send([x], 1, 0),
        ("torch's group", "receive"): lambda x: group.recv([x], 1, 0),
        ("torch", "send"): lambda x: dist.isend(x, 1),
        ("torch", "receive"): lambda x: dist.irecv(x, 1),
        ("torch, blocking", "send and receive"): lambda x: (dist.send(x, 1), dist.recv(x, 1)),
    }
    found = {name: _fake_bursts(call, rounds) for name, call in calls.items()}
    dist.destroy_process_group()
    return found


def _fake_bursts(call: Call, rounds: int) -> list[float]:
    tensors = [torch.full((ELEMENTS,), number, dtype=torch.int32) for number in range(BURST)]
    times_s = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        works = [call(tensor) for tensor in tensors]
        times_s.append((time.perf_counter() - began) / BURST)
        del works
    return times_s[1:]
