"""Weights from a trainer to workers on several hosts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lab.switch import needs_hosts
from unisono.bench.lab import Lab

pytestmark = [pytest.mark.lab, needs_hosts]

TRAINER = """
import numpy as np
from unisono.weight_transfer import WeightSender
values = {"large": np.ones(2**20), "small": np.arange(5)}
with WeightSender(timeout_s=60.0) as sender:
    print(sender.address, flush=True)
    while (asked := input()):
        values["large"] += 1
        update = sender.send(values, workers=int(asked))
        print(len(update.workers), len(update.failed), flush=True)
"""
WORKER = """
import sys
from unisono.weight_transfer import WeightReceiver
worker = WeightReceiver(sys.argv[1])
while (found := worker.receive()) is not None:
    print(float(found["large"].sum()) / 2**20, found["small"].tolist(), flush=True)
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as made:
        yield made


def start(stack: ExitStack, lab: Lab, host: int, *words: str) -> subprocess.Popen[str]:
    """Starts a program on a host; it ends with the test."""
    command = lab.command(host, [sys.executable, "-c", *words])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    found = stack.enter_context(subprocess.Popen(command, text=True, **pipes))
    stack.callback(found.kill)
    return found


def line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def ask(trainer: subprocess.Popen[str], workers: int) -> str:
    assert trainer.stdin is not None
    trainer.stdin.write(f"{workers}\n")
    trainer.stdin.flush()
    return line(trainer)


def test_workers_of_two_hosts(lab: Lab) -> None:
    with ExitStack() as stack:
        trainer = start(stack, lab, 0, TRAINER)
        address = line(trainer)
        near, far, dies = (start(stack, lab, host, WORKER, address) for host in (0, 1, 1))
        assert ask(trainer, 3) == "3 0"
        assert {line(each) for each in (near, far, dies)} == {"2.0 [0, 1, 2, 3, 4]"}
        dies.kill()
        dies.wait()
        assert ask(trainer, 1).startswith("2 ")
        assert {line(each) for each in (near, far)} == {"3.0 [0, 1, 2, 3, 4]"}
        late = start(stack, lab, 1, WORKER, address)
        assert ask(trainer, 3) == "3 0"
        assert {line(each) for each in (near, far, late)} == {"4.0 [0, 1, 2, 3, 4]"}
