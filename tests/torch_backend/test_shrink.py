"""Recovery of a torch program after the loss of a rank: by shrinking the group, or by torchrun's
restarts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from bootstrap_stores import free_port
from unisono.errors import AbortedError, PeerLostError, UnsupportedError
from unisono.torch_backend import reserved
from worlds.forked import start

pytestmark = pytest.mark.torch
RANKS = 3


def test_shrink(outcome):
    outcome.require_success()


def own_a_healthy_subgroup_shrinks_to_itself(world):
    part = dist.new_group([2, 0])
    if world.rank == 1:
        return
    shrunk = reserved.shrink_group(group=part)
    assert dist.get_process_group_ranks(shrunk) == dist.get_process_group_ranks(part)
    assert dist.get_world_size(shrunk) == 2
    x = torch.full((3,), float(world.rank))
    dist.broadcast(x, src=2, group=shrunk)
    assert x.tolist() == [2.0] * 3
    with pytest.raises(AbortedError, match="was shrunk to its ranks 0, 1"):
        dist.barrier(part)
    dist.destroy_process_group(shrunk)
    dist.destroy_process_group(part)


def own_excluded_ranks_need_not_come(world):
    group = dist.new_group()
    if world.rank != 1:
        shrunk = reserved.shrink_group([1], group)
        assert dist.get_process_group_ranks(shrunk) == [0, 2]
        dist.barrier(shrunk)
    else:
        with pytest.raises(AbortedError, match="was shrunk to its ranks 0, 2"):
            dist.barrier(group)


def own_other_backends_are_refused(world):
    with pytest.raises(UnsupportedError, match=r"call dist.shrink_group"):
        reserved.shrink_group(group=dist.new_group(backend="gloo"))


def loses_one(rank, folder):
    dist.init_process_group(
        "unisono", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3
    )
    dist.new_group()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        dist.all_reduce(torch.ones(4))
    world = reserved.shrink_group()
    assert world is dist.group.WORLD
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rank)
    x = torch.ones(2)
    dist.all_reduce(x)
    pair = dist.new_group([1, 0])
    dist.broadcast(x, src=1, group=pair)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    (folder / f"{rank}.json").write_text(json.dumps([dist.get_rank(), gathered, x.tolist()]))
    dist.destroy_process_group()


def on_host(number: int) -> dict[str, str]:
    """Returns the environment variables of a rank on the host with this number."""
    named = {"UNISONO_HOST_ID": f"host{number}", "UNISONO_INTERFACE": "=lo"}
    return {**os.environ, **named, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_default_group_is_replaced_after_a_loss(tmp_path, hosts):
    ranks = [
        start(
            __file__, "loses_one", rank, tmp_path, log=tmp_path / f"{rank}.log",
            environment=on_host(rank % hosts),
        )
        for rank in range(3)
    ]  # fmt: skip
    for process in ranks:
        process.join(90)
    texts = [(tmp_path / f"{rank}.log").read_text() for rank in range(3)]
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0], texts
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 2)]
    assert said == [[new, [0, 2], [2.0, 2.0]] for new in range(2)]


RESTARTED = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("unisono")
rank, died = dist.get_rank(), sys.argv[1] + "/died"
hosts = len(dist.group.WORLD.communicator.hosts)
dist.barrier()
if rank == 1 and not os.path.exists(died):
    open(died, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
x = torch.ones(1000)
for _ in range(20):
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
dist.all_reduce(x)
assert x.tolist() == [2.0] * 1000
dist.destroy_process_group()
open(f"{sys.argv[1]}/{rank} on {hosts}", "w").close()
"""


def test_torchrun_restarts_after_a_loss(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(RESTARTED)
    done = tmp_path / "done"
    done.mkdir()
    launcher = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    run = subprocess.run(
        [sys.executable, "-m", *launcher, *options, str(program), str(done)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = sorted(path.name for path in done.iterdir())
    assert said == [*(f"{rank} on 1" for rank in range(2)), "died"]


@pytest.mark.slow
def test_torchrun_restarts_all_nodes_after_a_loss(tmp_path: Path):
    """Runs two torchrun agents, which act as two hosts. One of the first agent's ranks dies."""
    program = tmp_path / "program.py"
    program.write_text(RESTARTED.replace("[2.0]", "[4.0]"))
    done = tmp_path / "done"
    done.mkdir()
    port = free_port()
    options = [
        *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1"),
        *("--monitor-interval", "0.1", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two"),
    ]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, str(program), str(done)],
            env=on_host(node),
        )
        for node in range(2)
    ]
    assert [node.wait(110) for node in nodes] == [0, 0]
    said = sorted(path.name for path in done.iterdir())
    assert said == [*(f"{rank} on 2" for rank in range(4)), "died"]
