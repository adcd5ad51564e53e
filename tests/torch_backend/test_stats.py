"""Calls through torch are counted by the communicator of their group."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from traffic_matrix import sent_and_received, traffic

pytestmark = pytest.mark.torch
RANKS = 3
BACKENDS = ("unisono",)


def test_stats(outcome):
    outcome.require_success()


def require_counted(world, op, counts, call, group, calls=1):
    """Asserts that `call` is counted as `calls` calls of `op`, with these numbers of float32
    elements.
    """
    before = group.communicator.stats()
    call()
    found = (group.communicator.stats() - before).operations
    sent, received = sent_and_received(traffic(op, counts, RANKS), world.rank)
    assert found[op].calls == calls
    assert (found[op].bytes_sent, found[op].bytes_received) == (
        calls * 4 * sent,
        calls * 4 * received,
    )
    assert sum(each.calls for each in found.values()) == calls


def own_collectives(world):
    group = dist.new_group()
    x, whole = torch.ones(5), torch.ones(5 * RANKS)
    require_counted(world, "all_reduce", [5], lambda: dist.all_reduce(x, group=group), group)
    require_counted(
        world,
        "all_reduce",
        [5],
        lambda: dist.all_reduce(x, group=group, async_op=True).wait(),
        group,
    )
    require_counted(
        world,
        "all_gather",
        [5] * RANKS,
        lambda: dist.all_gather_into_tensor(whole, x, group=group),
        group,
    )
    require_counted(
        world,
        "reduce_scatter",
        [5] * RANKS,
        lambda: dist.reduce_scatter_tensor(x, whole, group=group),
        group,
    )
    require_counted(
        world,
        "all_to_all",
        [5] * RANKS,
        lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        group,
    )
    require_counted(world, "barrier", [], lambda: dist.barrier(group), group)


def own_uneven_exchange(world):
    group = dist.new_group()
    table = [[(src + dst) % RANKS for dst in range(RANKS)] for src in range(RANKS)]
    sends = table[world.rank]
    receives = [row[world.rank] for row in table]
    x, out = torch.ones(sum(sends)), torch.empty(sum(receives))
    require_counted(
        world,
        "all_to_all",
        [count for row in table for count in row],
        lambda: dist.all_to_all_single(out, x, receives, sends, group=group),
        group,
    )


def own_coalesced_calls(world):
    group = dist.new_group()
    tensors = [torch.ones(5) for _ in range(4)]

    def coalesced():
        with dist._coalescing_manager(group=group):
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)

    require_counted(world, "all_reduce", [5], coalesced, group, calls=4)


def own_messages(world):
    group = dist.new_group()
    comm = group.communicator
    x, y = torch.ones(100), torch.empty(100)
    right, left = (world.rank + 1) % RANKS, (world.rank - 1) % RANKS
    before = comm.stats()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, right, group), dist.P2POp(dist.irecv, y, left, group)]
    )
    for work in works:
        work.wait()
    found = comm.stats() - before
    assert (found.operations["send"].calls, found.bytes_sent) == (1, 400)
    assert (found.operations["recv"].calls, found.bytes_received) == (1, 400)
