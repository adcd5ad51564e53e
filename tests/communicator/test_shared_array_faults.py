"""Faults while ranks write to each other's shared arrays: killed, stopped and aborting ranks.

Every survivor is told soon, nobody changes its arrays after that, and the survivors go on in a
smaller group.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from communicator.shrinking_hosts import over_hosts
from ranks import Me, Processes
from time_limits import limit_s
from unisono import CommunicationError, Communicator

Array = NDArray[Any]

RANKS = 3
MOST_S = 1.0
TIMEOUT_S = 1.0
FAULTS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGABRT)
COUNTS = (20_000, 100_001, 1 << 20, 3_000_001)
MOST_DELAY_S = 0.06
HOSTS = ((0, 0, 1), (0, 1, 2), (0, 1, 0))


def reducing(comm: Communicator, x: Array) -> Callable[[int], None]:
    """Returns a step in which all ranks write to each other's `x` by an all_reduce."""

    def step(number: int) -> None:
        x[:] = comm.rank + number % 100
        comm.all_reduce(x)
        expected = sum(range(comm.size)) + comm.size * (number % 100)
        assert (x == expected).all(), f"step {number}: a wrong result without an error"

    return step


def putting(comm: Communicator, x: Array) -> Callable[[int], None]:
    """Returns a step in which each rank puts to the `x` of the next rank."""
    window, sent = comm.window(x), np.empty_like(x)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

    def step(number: int) -> None:
        sent[:] = comm.rank + number % 100
        window.put(sent, right, signal=True)
        window.wait(left)
        assert (x == left + number % 100).all(), f"step {number}: a wrong result without an error"
        window.signal(left)  # it may put again
        window.wait(right)

    return step


def steps_until_told(me: Me) -> None:
    comm = me.join()
    count = int(os.environ["COUNT"])
    x, beside = comm.empty(count, np.float32), comm.empty(100, np.float32)
    beside[:] = me.rank
    step = (putting if os.environ["PUTS"] else reducing)(comm, x)
    step(0)
    if os.environ["FAULT"] == "SIGSTOP":
        comm.timeout_s = TIMEOUT_S
    me.say("ready")
    for number in itertools.count(1):
        try:
            step(number)
        except CommunicationError as error:
            before = zlib.crc32(x)
            me.say("told", error=type(error).__name__)
            break
    if me.rank == int(os.environ["VICTIM"]):
        return
    me.wait_for_go()
    same = zlib.crc32(x) == before
    x[::3] = 7
    same = same and (x[::3] == 7).all() and (beside == me.rank).all()
    comm.timeout_s = 30.0
    with comm.shrink() as shrunk:
        y = shrunk.empty(count, np.float32)
        y[:] = 1
        shrunk.all_reduce(y)
        x[:] = 1  # an ordinary array in the new group
        shrunk.all_reduce(x)
        right = (y == shrunk.size).all() and (x == shrunk.size).all()
        me.say("shrunk", same=bool(same), right=bool(right), size=shrunk.size)


def strike(
    fault: signal.Signals, seed: int, puts: bool, hosts: Sequence[int] | None = None
) -> None:
    """Strikes one rank at a random time. `hosts` has the host of each rank (None: a single one)."""
    rng = random.Random(seed)
    victim = rng.randrange(RANKS)
    survivors = [rank for rank in range(RANKS) if rank != victim]
    environment = {
        "FAULT": fault.name, "COUNT": str(rng.choice(COUNTS)), "VICTIM": str(victim),
        "PUTS": "yes" if puts else "",
    }  # fmt: skip
    with _started(environment, hosts) as job:
        job.wait_for("ready", range(RANKS))
        time.sleep(rng.uniform(0, MOST_DELAY_S))
        struck = job.signal(victim, fault)
        allowed_s = limit_s(MOST_S)
        if fault is signal.SIGSTOP:
            allowed_s += TIMEOUT_S
        for said in job.wait_for("told", survivors):
            assert said["at"] - struck < allowed_s, said
        if fault is signal.SIGSTOP:
            job.signal(victim, signal.SIGCONT)
            job.wait_for("told", [victim])
        job.processes[victim].wait(30)
        job.go(*survivors)
        for said in job.wait_for("shrunk", survivors):
            assert (said["same"], said["right"], said["size"]) == (True, True, RANKS - 1), said


def _started(environment: dict[str, str], hosts: Sequence[int] | None) -> Processes:
    if hosts is None:
        return Processes(steps_until_told, RANKS, environment=lambda rank: environment)
    return over_hosts(steps_until_told, hosts, environment)


@pytest.mark.parametrize("puts", [False, True], ids=["all_reduce", "put"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_survivors_are_told_and_not_harmed(fault: signal.Signals, seed: int, puts: bool) -> None:
    strike(fault, seed, puts)


@pytest.mark.parametrize("puts", [False, True], ids=["all_reduce", "put"])
@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_survivors_on_several_hosts(
    fault: signal.Signals, hosts: Sequence[int], puts: bool
) -> None:
    strike(fault, 7, puts, hosts)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_many_faults(fault: signal.Signals) -> None:
    for seed in range(100, 200):
        strike(fault, seed, puts=seed % 2 == 1)
        strike(fault, seed, puts=seed % 2 == 1, hosts=HOSTS[seed % 3])
