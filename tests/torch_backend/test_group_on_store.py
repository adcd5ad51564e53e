"""Groups that ranks make from a store, a rank and a size: ranks are lost, and others come."""

from __future__ import annotations

import gc
import os
import signal
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from group_resources import mappings, open_files
from unisono.errors import PeerLostError, RendezvousError
from unisono.torch_backend import communicator_of, group_on_store
from worlds.forked import join_all, start

pytestmark = pytest.mark.torch
LIMIT = timedelta(seconds=60)


def made(store, quorum, rank, size):
    return group_on_store(dist.PrefixStore(f"quorum {quorum}", store), rank, size, LIMIT)


def require_sum(group, size):
    """Asserts the sums of an element-wise known all_reduce, and of one through torch's function."""
    totals = torch.arange(1000.0) + group.rank()
    group.allreduce([totals]).wait()
    assert torch.equal(totals, size * torch.arange(1000.0) + size * (size - 1) / 2)
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [float(size)] * 3


def stays(rank, port, folder):
    """A rank of three that loses rank 2, goes on in a pair, and is then joined by another."""
    store = dist.TCPStore("127.0.0.1", port)
    group = made(store, 0, rank, 3)
    require_sum(group, 3)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        group.allreduce([torch.ones(1 << 20)]).wait()
    group.abort()
    group.shutdown()
    pair = made(store, 1, 1 - rank, 2)  # in another order
    require_sum(pair, 2)
    pair.shutdown()  # no abort, which would end a call that the other rank has not finished
    four = made(store, 2, rank + 2, 4)
    require_sum(four, 4)
    four.shutdown()
    (folder / f"{rank}.done").touch()


def comes(rank, port, folder):
    """A rank that comes when the others make their third group."""
    group = made(dist.TCPStore("127.0.0.1", port), 2, rank, 4)
    require_sum(group, 4)
    group.shutdown()
    (folder / f"new {rank}.done").touch()


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_are_lost_and_others_come(tmp_path, hosts):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        start(
            __file__, name, rank, store.port, tmp_path, log=tmp_path / f"{name}{rank}.log",
            environment={"UNISONO_HOST_ID": f"host{rank % hosts}", "UNISONO_INTERFACE": "=lo"},
        )
        for name, count in (("stays", 3), ("comes", 2))
        for rank in range(count)
    ]  # fmt: skip
    join_all(ranks)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    done = sorted(path.name for path in tmp_path.glob("*.done"))
    assert done == ["0.done", "1.done", "new 0.done", "new 1.done"], logs


def test_a_group_that_was_aborted_leaves_nothing_open():
    store = dist.HashStore()
    for quorum in range(8):
        group = made(store, quorum, 0, 1)
        require_sum(group, 1)
        group.abort()
        group.shutdown()
        del group
        if quorum == 1:
            gc.collect()  # what earlier tests have left
            before = open_files(), mappings()
    gc.collect()
    assert open_files() <= before[0]
    assert mappings() <= before[1]


def test_a_missing_rank_is_named():
    with pytest.raises(RendezvousError, match=r"these ranks of 2 are missing: \[1\]"):
        group_on_store(dist.HashStore(), 0, 2, timedelta(seconds=0.2))


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1)])
def test_the_timeout_must_be_positive(timeout):
    with pytest.raises(ValueError, match="timeout: expected a positive time"):
        group_on_store(dist.HashStore(), 0, 1, timeout)


def test_the_rank_must_be_one_of_the_group():
    with pytest.raises(ValueError, match="expected a rank from 0 to size-1"):
        group_on_store(dist.HashStore(), 2, 2, LIMIT)


def test_the_timeout_is_that_of_the_group():
    group = group_on_store(dist.HashStore(), 0, 1, timedelta(seconds=7))
    assert communicator_of(group).timeout_s == 7.0
    group.shutdown()
