"""How the ranks of a group agree on a rendezvous, and whole programs under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import entry_points

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402

from unisono.torch_backend.creator import _agree  # noqa: E402

pytestmark = pytest.mark.torch

TIMEOUT = timedelta(seconds=10)


def agreed_by(ranks, store):
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: _agree(store, rank, TIMEOUT), range(ranks)))


def test_all_ranks_get_one_string():
    assert len(set(agreed_by(3, dist.HashStore()))) == 1


def test_groups_do_not_share_a_string():
    store = dist.HashStore()
    first = agreed_by(2, dist.PrefixStore("0/", store))
    second = agreed_by(2, dist.PrefixStore("1/", store))
    assert first[0] != second[0]


def test_second_group_on_a_used_store_gets_a_new_string():
    store = dist.HashStore()
    first, second = agreed_by(3, store), agreed_by(3, store)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr", "127.0.0.1", "--nproc-per-node", "3"]
    result = subprocess.run(
        [*command, *options, str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("rank done") == 3
