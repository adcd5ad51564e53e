"""Hundreds of ranks form a group: threads of several processes, which act as hosts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import unisono
from bootstrap_stores import free_port
from ranks import Me, Processes

THREADS = 16


def many(me: Me) -> None:
    """Runs many ranks of one host. Each rank exchanges messages with its neighbours."""
    size = me.size * THREADS

    def rank(number: int) -> int:
        with unisono.init(number, size, me.name, timeout_s=60) as comm:
            total = comm.all_reduce(np.full(100, number, np.int64))
            assert (total == size * (size - 1) // 2).all()
            out = np.zeros(1, np.int64)
            comm.sendrecv(np.array([number]), (number + 1) % size, out, (number - 1) % size)
            return int(out[0])

    own = range(me.rank * THREADS, (me.rank + 1) * THREADS)
    with ThreadPoolExecutor(THREADS) as threads:
        assert list(threads.map(rank, own)) == [(number - 1) % size for number in own]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("hosts", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_hundreds_of_ranks_form_a_group(hosts: int) -> None:
    with Processes(
        many,
        hosts,
        name=f"tcp://127.0.0.1:{free_port()}",
        environment=lambda host: {
            "UNISONO_HOST_ID": f"host {host}",
            "UNISONO_INTERFACE": "=lo",
            "UNISONO_JOB_SECRET": "hundreds of ranks may know it",
        },
    ) as processes:
        assert processes.exit_codes(timeout_s=150) == [0] * hosts
