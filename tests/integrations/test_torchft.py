"""torchft's process group over Unisono: reconfiguration with other ranks, failure and recovery."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

pytest.importorskip("torchft")

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torchft import process_group

from unisono.errors import AbortedError
from unisono.integrations.torchft_group import ProcessGroupUnisono

pytestmark = pytest.mark.torch
LIMIT = timedelta(seconds=60)


def reconfigure(group, store, prefix, rank, size):
    """Reconfigures the group with the function of torchft's version."""
    address = f"localhost:{store.port}/{prefix}"
    if hasattr(process_group, "reconfigure_with_store"):
        process_group.reconfigure_with_store(group, address, rank, size, LIMIT)
    else:
        group.configure(address, str(rank), rank, size)


@pytest.fixture
def store():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def groups():
    made = [ProcessGroupUnisono(timeout=LIMIT) for _ in range(3)]
    yield made
    for each in made:
        each.shutdown()


def on_each(members, call):
    """Calls `call(rank, member)` for each member in a thread, and returns the results."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(call, range(len(members)), members))


def total_of(group, value):
    tensor = torch.full((1000,), float(value))
    group.allreduce([tensor], dist.ReduceOp.SUM).wait()
    return tensor.unique().tolist()


def test_ranks_change_number_and_order(groups, store):
    for quorum, members in enumerate(([0, 1, 2], [2, 0], [1, 2, 0], [1])):

        def joins(rank, member, quorum=quorum, members=members):
            group = groups[member]
            reconfigure(group, store, f"quorum/{quorum}", rank, len(members))
            assert group.size() == len(members) and group.errored() is None
            return total_of(group, member + 1)

        assert on_each(members, joins) == [[float(sum(members) + len(members))]] * len(members)


def test_an_aborted_group_says_so_and_is_reconfigured(groups, store):
    def fails_and_returns(rank, member):
        group = groups[member]
        reconfigure(group, store, "first", rank, 2)
        assert total_of(group, 1) == [2.0]
        parent = group.parent
        if rank == 1:
            group.abort()
        else:
            with pytest.raises(AbortedError):
                group.allreduce([torch.ones(4)], dist.ReduceOp.SUM).wait()
            assert group.errored() is not None
        reconfigure(group, store, "second", rank, 2)
        assert group.parent is not parent and group.errored() is None
        return total_of(group, 1)

    assert on_each([0, 1], fails_and_returns) == [[2.0], [2.0]]


def test_other_collectives(groups, store):
    def calls(rank, member):
        group = groups[member]
        reconfigure(group, store, "collectives", rank, 2)
        gathered = [torch.zeros(2), torch.zeros(2)]
        group.allgather([gathered], [torch.full((2,), float(rank))], c10d.AllgatherOptions()).wait()
        group.broadcast_one(gathered[0], 1).wait()
        share = torch.zeros(2)
        pieces = [torch.full((2,), float(piece + rank)) for piece in range(2)]
        group.reduce_scatter([share], [pieces], c10d.ReduceScatterOptions()).wait()
        group.barrier().wait()
        return [each.tolist() for each in (*gathered, share)]

    assert on_each([0, 1], calls) == [
        [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
        [[0.0, 0.0], [1.0, 1.0], [3.0, 3.0]],
    ]
