"""Agreement of a group's ranks on a rendezvous, and complete programs under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from bootstrap_stores import free_port  # noqa: E402
from unisono import config  # noqa: E402
from unisono.communicator.store_join import exchange_hosts  # noqa: E402
from worlds.forked import start  # noqa: E402

pytestmark = pytest.mark.torch


def introduced(ranks, store, hosts=1):
    def settings(rank):
        return config.Settings(timeout_s=10.0, host_id=str(rank % hosts))

    with ThreadPoolExecutor(ranks) as pool:
        tries = [pool.submit(exchange_hosts, store, r, ranks, settings(r)) for r in range(ranks)]
        return [one.result() for one in tries]


def agreed_by(ranks, store):
    return [text for text, _ in introduced(ranks, store)]


def test_all_ranks_get_one_rendezvous():
    assert len(set(agreed_by(3, dist.HashStore()))) == 1


def test_groups_do_not_share_a_rendezvous():
    store = dist.HashStore()
    first = agreed_by(2, dist.PrefixStore("0/", store))
    second = agreed_by(2, dist.PrefixStore("1/", store))
    assert first[0] != second[0]


def test_second_group_on_a_store_gets_a_new_rendezvous():
    store = dist.HashStore()
    first, second = agreed_by(3, store), agreed_by(3, store)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_ranks_learn_whether_they_are_on_one_host():
    assert {alone for _, alone in introduced(3, dist.HashStore())} == {True}
    assert {alone for _, alone in introduced(3, dist.HashStore(), hosts=2)} == {False}


@pytest.mark.slow
def test_program_under_torchrun(tmp_path):
    if not any(entry.name == "unisono" for entry in entry_points(group="torch.backends")):
        pytest.skip("the package's entry points are not installed")
    program = tmp_path / "program.py"
    program.write_text(
        """
import torch, torch.distributed as dist
dist.init_process_group("cpu:unisono")
for _ in range(2):
    tensor = torch.ones(1000) * (1 + dist.get_rank())
    dist.all_reduce(tensor)
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(tensor, group=group)
        assert tensor.unique().tolist() == [12.0]
    dist.destroy_process_group()
    dist.init_process_group("unisono")
dist.destroy_process_group()
print("rank done")
"""
    )
    assert torchrun(program, 3, TORCH_DISTRIBUTED_DEBUG="DETAIL").count("rank done") == 3


def over_hosts():
    dist.init_process_group("unisono")
    rank = dist.get_rank()
    assert dist.group.WORLD.communicator.hosts == ((0, 1), (2, 3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor = torch.ones(1000) * (1 + rank)
    dist.all_reduce(tensor, group=mesh.get_group("tensor"))
    dist.all_reduce(tensor, group=mesh.get_group("data"))
    assert tensor.unique().tolist() == [10.0]
    if rank in (0, 3):
        dist.all_reduce(tensor, group=dist.new_group([0, 3], use_local_synchronization=True))
        assert tensor.unique().tolist() == [20.0]
    seen = [None] * 4
    dist.all_gather_object(seen, {"rank": rank})
    assert [one["rank"] for one in seen] == [0, 1, 2, 3]
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 200))
    model(torch.ones(4, 300) * rank).sum().backward()
    assert (model.module.weight.grad == 6.0).all()  # the mean of 4 * rank over the ranks
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("tls", ["off", pytest.param("psk", marks=pytest.mark.slow)])
def test_program_over_hosts(tmp_path, tls):
    """Runs four ranks on two simulated hosts, with torchrun's environment variables. Forms
    subgroups within hosts, across hosts, and of all ranks.
    """
    told = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4",
        "UNISONO_TLS": tls, "UNISONO_JOB_SECRET": "a secret of these ranks",
        "UNISONO_INTERFACE": "=lo",
    }  # fmt: skip
    ranks = []
    for rank in range(4):
        environment = {**told, "RANK": str(rank), "UNISONO_HOST_ID": str(rank // 2)}
        log = tmp_path / f"{rank}.log"
        ranks.append(start(__file__, "over_hosts", log=log, environment=environment))
    for process in ranks:
        process.join(100)
    texts = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    assert [process.exitcode for process in ranks] == [0] * 4, texts


def torchrun(program, ranks, **environ):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, *options, str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
