"""Tests all figures of `benchmarks/p2p.py` except the times, with real ranks and small messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import p2p_memory
import pytest
from p2p_memory import Load

from unisono.bench.lab import Lab

LOAD = Load(messages=3, nbytes=4096)


def test_ranks_on_one_host() -> None:
    found = p2p_memory._run(LOAD, None, wait_s=0.1)
    assert found["wrong"] == 0
    assert 0 <= found["waiting_bytes"] <= found["growth_bytes"]


@pytest.mark.lab
def test_ranks_on_two_hosts() -> None:
    with Lab(hosts=2) as lab:
        assert p2p_memory._run(LOAD, lab, wait_s=0.1)["wrong"] == 0


class Rank0:
    """A simulated communicator that delivers messages in a given order and allocates memory while
    it waits.
    """

    def __init__(self, order: Sequence[int], kept_bytes: int = 0) -> None:
        self._messages = iter([LOAD.message(number) for number in order])
        self._kept_bytes = kept_bytes

    def barrier(self) -> None: ...

    def recv(self, out: Any, src: int, tag: int = 0) -> None:
        if src == 2:
            out[:] = next(self._messages)
        else:
            np.ones(self._kept_bytes, np.uint8)


def received(comm: Rank0) -> dict[str, int]:
    return p2p_memory._receive(comm, LOAD)  # type: ignore[arg-type]


def test_reordered_messages_are_found() -> None:
    assert received(Rank0([0, 1, 2]))["wrong"] == 0
    assert received(Rank0([1, 0, 2]))["wrong"] == 2 * 512


# In a process of its own: here threads and garbage of other tests may free memory meanwhile.
_GROWTH = """
import gc, json
from bench.test_p2p import Rank0, received
gc.disable()
print(json.dumps(received(Rank0([0, 1, 2], kept_bytes=64 << 20))))
"""


def test_freed_memory_counts_as_growth() -> None:
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests.parent / "benchmarks")]
    done = subprocess.run(
        [sys.executable, "-c", _GROWTH],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    # The kernel updates the number of pages in batches.
    assert 60 << 20 <= found["waiting_bytes"] <= found["growth_bytes"]
