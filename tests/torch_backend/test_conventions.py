"""Cases that gloo does not support or handles differently: uneven lists, types, layouts, calling
conventions.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import distributed as dist

from torch_backend.contributions import contribution, contributions, require_equal
from worlds.torch_version import needs_torch

pytestmark = pytest.mark.torch
RANKS = 3

LENGTHS = (0, 1, 7, 1000, 40_001)


def test_conventions(outcome):
    outcome.require_success()


def own_all_to_all_lists_of_any_length(world):
    sources = [contribution(world.rank, 3 * target, seed=target) for target in range(world.size)]
    outputs = [torch.empty(3 * world.rank) for _ in range(world.size)]
    dist.all_to_all(outputs, sources)
    for rank, output in enumerate(outputs):
        require_equal(output, contribution(rank, 3 * world.rank, seed=world.rank).numpy())


def own_lists_are_exchanged_without_waiting(world):
    # The other ranks begin only after rank 0's asynchronous call has returned.
    sources = [contribution(world.rank, 3 * target, seed=target) for target in range(world.size)]
    outputs = [torch.empty(3 * world.rank) for _ in range(world.size)]
    if world.rank == 0:
        work = dist.all_to_all(outputs, sources, async_op=True)
        for rank in range(1, world.size):
            dist.send(torch.ones(1), rank)
    else:
        dist.recv(torch.empty(1), 0)
        work = dist.all_to_all(outputs, sources, async_op=True)
    work.wait()
    for rank, output in enumerate(outputs):
        require_equal(output, contribution(rank, 3 * world.rank, seed=world.rank).numpy())


def own_lists_that_share_memory(world):
    rows = torch.full((world.size * 2, 3), float(world.rank))
    dist.all_to_all_single(rows, rows, [2] * world.size, [2] * world.size)
    require_equal(rows[:, 0], np.repeat(np.arange(world.size), 2))


def own_all_gather_into_stacked_tensor(world):
    for length in LENGTHS:
        stacked = torch.empty(world.size, length)
        work = dist.all_gather_into_tensor(stacked, contribution(world.rank, length), async_op=True)
        work.wait()
        require_equal(stacked, contributions(world, length))


def own_all_gather_of_uneven_lengths(world):
    pieces = [torch.empty(10 * rank) for rank in range(world.size)]
    dist.all_gather(pieces, contribution(world.rank, 10 * world.rank))
    for rank, piece in enumerate(pieces):
        require_equal(piece, contribution(rank, 10 * rank).numpy())


def own_reduce_scatter_of_uneven_lengths(world):
    pieces = [contribution(world.rank, 5 * target, seed=target) for target in range(world.size)]
    output = torch.empty(5 * world.rank)
    dist.reduce_scatter(output, pieces)
    require_equal(output, contributions(world, 5 * world.rank, seed=world.rank).sum(axis=0))


def own_average(world):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = contribution(world.rank, 64, dtype) * world.size
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        require_equal(tensor, contributions(world, 64, dtype).sum(axis=0))
        output = torch.empty(64, dtype=dtype)
        source = contribution(world.rank, 64 * world.size, dtype) * world.size
        dist.reduce_scatter_tensor(output, source, dist.ReduceOp.AVG)
        total = contributions(world, 64 * world.size, dtype).sum(axis=0)
        require_equal(output, total.reshape(world.size, 64)[world.rank])


def own_premultiplied_sum(world):
    needs_torch("2.13", "PREMUL_SUM is no function")
    op = dist.ReduceOp.PREMUL_SUM(0.5)
    tensor = contribution(world.rank, 64)
    dist.all_reduce(tensor, op)
    require_equal(tensor, contributions(world, 64).sum(axis=0) / 2)
    source = contribution(world.rank, 8 * world.size)
    output = torch.empty(8)
    dist.reduce_scatter_tensor(output, source, op)
    total = contributions(world, 8 * world.size).sum(axis=0) / 2
    require_equal(output, total.reshape(world.size, 8)[world.rank])
    require_equal(source, contribution(world.rank, 8 * world.size).numpy())


def own_bool_reductions(world):
    flags = torch.tensor([True, False, world.rank == 0])
    for op, expected in (
        (dist.ReduceOp.MAX, [True, False, True]),
        (dist.ReduceOp.MIN, [True, False, False]),
    ):
        tensor = flags.clone()
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == expected


def own_non_contiguous_tensors(world):
    base = torch.zeros(50, 4)
    column = base[:, 1]
    column.copy_(contribution(world.rank, 50))
    dist.all_reduce(column)
    require_equal(base[:, 1], contributions(world, 50).sum(axis=0))
    assert base[:, (0, 2, 3)].abs().sum() == 0
    transposed = torch.empty(world.size, 6).t()
    dist.broadcast(transposed.copy_(torch.full((6, world.size), float(world.rank))), 2)
    require_equal(transposed, np.full((6, world.size), 2.0))


def own_non_contiguous_pieces(world):
    stacked = torch.zeros(5, world.size).t()
    dist.all_gather(list(stacked), contribution(world.rank, 5))
    require_equal(stacked, contributions(world, 5))


def own_types_that_only_move(world):
    tensor = torch.full((16,), float(world.rank)).to(torch.float8_e4m3fn)
    pieces = [torch.empty_like(tensor) for _ in range(world.size)]
    dist.all_gather(pieces, tensor)
    assert [piece.float()[3].item() for piece in pieces] == [0.0, 1.0, 2.0]
    stacked = torch.empty(16 * world.size, dtype=torch.float8_e4m3fn)
    dist.all_gather_into_tensor(stacked, tensor)
    require_equal(stacked.float().reshape(world.size, 16)[:, 0], [0.0, 1.0, 2.0])


def own_narrow_sums_round_once(world):
    tensor = torch.full((8,), 1.0 + 2**-7, dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    expected = (torch.full((8,), 1.0 + 2**-7) * world.size).to(torch.bfloat16)
    assert torch.equal(tensor, expected)


def own_coalescing_with_a_device(world):
    reduced, gathered = contribution(world.rank, 10), torch.empty(world.size * 4)
    device = torch.device("cpu")
    with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as manager:
        first = dist.broadcast(reduced, 0, async_op=True)
        dist.reduce(reduced, 1)
        assert not first.is_completed()
    manager.wait()
    first.wait()
    if world.rank == 1:
        require_equal(reduced, contribution(0, 10).numpy() * world.size)
    dist.all_gather_into_tensor(gathered, contribution(world.rank, 4))
    require_equal(gathered, contributions(world, 4).reshape(-1))


def own_deprecated_coalesced_calls(world):
    inputs = [contribution(world.rank, 3), contribution(world.rank, 5)]
    outputs = [[torch.empty(3), torch.empty(5)] for _ in range(world.size)]
    dist.all_gather_coalesced(outputs, inputs)
    for rank, (three, five) in enumerate(outputs):
        require_equal(three, contribution(rank, 3).numpy())
        require_equal(five, contribution(rank, 5).numpy())
    dist.all_reduce_coalesced(inputs)
    require_equal(inputs[1], contributions(world, 5).sum(axis=0))


def own_methods_with_bare_tensors(world):
    group = dist.group.WORLD
    tensor = contribution(world.rank, 12)
    group.allreduce(tensor).wait()
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    group.allreduce(tensor, op=dist.ReduceOp.MIN).wait()
    require_equal(tensor, contributions(world, 12).sum(axis=0))
    group.broadcast(tensor.add_(world.rank), 0).wait()
    require_equal(tensor, contributions(world, 12).sum(axis=0))
    pieces = [torch.empty(12) for _ in range(world.size)]
    group.allgather(pieces, tensor).wait()
    require_equal(torch.stack(pieces).sum(0), world.size * contributions(world, 12).sum(axis=0))
    group.gather(pieces if world.rank == 0 else [], tensor, 0).wait()
    group.scatter(tensor, pieces if world.rank == 0 else [], 0).wait()
    group.reduce(tensor, 1, dist.ReduceOp.SUM).wait()
    group.reduce_scatter(tensor, pieces, dist.ReduceOp.SUM).wait()
    group.alltoall(pieces, [tensor.clone() for _ in pieces]).wait()
    group.barrier().wait()


def own_results_of_works(world):
    tensor = contribution(world.rank, 12)
    work = dist.all_reduce(tensor, async_op=True)
    work.synchronize()
    assert work.result()[0] is tensor
    assert work.exception() is None
    assert work.get_future().value()[0] is tensor


def own_group_attributes(world):
    group = dist.group.WORLD
    assert group.name() == "unisono"
    assert dist.get_backend() == "unisono"
    assert group._device_types == [torch.device("cpu")]
    before = group._get_sequence_number_for_group()
    dist.barrier()
    assert group._get_sequence_number_for_group() == before + 1
    group.set_timeout(timedelta(seconds=17))
    if torch.__version__ >= "2.13":
        dist.barrier(timeout=timedelta(seconds=9))
    group.monitored_barrier(timedelta(seconds=9))
