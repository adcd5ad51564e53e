"""`unisono.run(executor=...)` with workers on several hosts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.switch import needs_hosts
from unisono.bench.lab import Lab

pytestmark = [pytest.mark.lab, needs_hosts]

PROGRAM = """
import json, os, pickle, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import unisono

CALL = "import pickle, sys; fn, args = pickle.load(sys.stdin.buffer); fn(*args)"

class Hosts(ThreadPoolExecutor):
    '''Runs calls on the hosts in turn.'''

    def __init__(self, commands):
        super().__init__(8)
        self.commands, self.calls = commands, 0

    def submit(self, fn, *args):
        words = self.commands[self.calls % len(self.commands)]
        self.calls += 1
        return super().submit(
            subprocess.run, [*words, sys.executable, "-c", CALL], check=True,
            input=pickle.dumps((fn, args)),
        )

def total():
    with unisono.init() as comm:
        where = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
        return comm.all_reduce(np.full(4, comm.rank + 1.0)).tolist(), comm.hosts, where

def gradients():
    import torch
    from torch import distributed as dist
    dist.init_process_group("unisono")
    found = torch.ones(3)
    dist.all_reduce(found)
    dist.destroy_process_group()
    return found.tolist()

if __name__ == "__main__":
    with Hosts(json.loads(sys.argv[1])) as hosts:
        print(json.dumps(unisono.run(total, 4, executor=hosts)))
        print(json.dumps(unisono.run(gradients, 2, executor=hosts)))
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as made:
        yield made


def test_ranks_on_the_hosts_of_an_executor(lab: Lab, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    commands = json.dumps([lab.command(host, []) for host in range(2)])
    said = lab.run(0, [sys.executable, str(program), commands], timeout_s=100)
    totals, gradients = map(json.loads, said.splitlines())
    assert [values for values, _, _ in totals] == [[10.0] * 4] * 4
    assert [hosts for _, hosts, _ in totals] == [[[0, 2], [1, 3]]] * 4
    assert [where for _, _, where in totals] == [["0", "2"], ["0", "2"], ["1", "2"], ["1", "2"]]
    assert gradients == [[2.0] * 3] * 2
