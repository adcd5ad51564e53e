"""Programs under two agents of torchrun, which act as two nodes: static, and elastic."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootstrap_stores import free_port

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("unisono")
folder, last, size = sys.argv[1], int(sys.argv[2]), dist.get_world_size()
hosts = len(dist.group.WORLD.communicator.hosts)
x = torch.ones(1000)
dist.all_reduce(x)
assert x.tolist() == [float(size)] * 1000
open(f"{folder}/{dist.get_rank()} of {size} on {hosts}", "w").close()
if size < last:
    time.sleep(100)  # torchrun ends this rank when another node comes
dist.barrier()
dist.destroy_process_group()
"""


def node(number: int, program: Path, last: int, *options: str) -> subprocess.Popen[bytes]:
    """Starts the agent of a node with one rank."""
    own = {
        "UNISONO_HOST_ID": f"node{number}", "UNISONO_INTERFACE": "=lo", "OMP_NUM_THREADS": "1",
        # torch 2.13's agents wait for each other in vain if a node comes while they share a store
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    launcher = ["torch.distributed.run", "--nproc-per-node", "1", "--monitor-interval", "0.1"]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, *options, str(program), str(program.parent), str(last)],
        env={**os.environ, **own},
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_text(PROGRAM)
    return path


def said(program: Path) -> list[str]:
    return sorted(path.name for path in program.parent.iterdir() if path != program)


def test_static_nodes(program: Path) -> None:
    address = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    nodes = [node(each, program, 2, *address, "--node-rank", str(each)) for each in range(2)]
    assert [each.wait(110) for each in nodes] == [0, 0]
    assert said(program) == ["0 of 2 on 2", "1 of 2 on 2"]


def test_a_node_that_comes_later_joins(program: Path) -> None:
    elastic = [
        *("--nnodes", "1:2", "--max-restarts", "3", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        *("--rdzv-id", "elastic", "--rdzv-conf", "last_call_timeout=1,join_timeout=90"),
    ]
    nodes = [node(0, program, 2, *elastic)]
    deadline = time.monotonic() + 60
    while not said(program) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert said(program) == ["0 of 1 on 1"]
    nodes.append(node(1, program, 2, *elastic))
    assert [each.wait(100) for each in nodes] == [0, 0]
    assert said(program) == ["0 of 1 on 1", "0 of 2 on 2", "1 of 2 on 2"]
