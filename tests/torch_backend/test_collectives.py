"""Every collective through torch.distributed, compared with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import distributed as dist

from torch_backend.contributions import contribution, contributions, require_equal

pytestmark = pytest.mark.torch
RANKS = 3

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
LENGTHS = (0, 1, 7, 1000, 40_001)


def test_collectives(outcome):
    outcome.require_success()


def check_all_reduce_types_and_lengths(world):
    for dtype in DTYPES:
        for length in LENGTHS:
            tensor = contribution(world.rank, length, dtype)
            dist.all_reduce(tensor)
            require_equal(tensor, contributions(world, length, dtype).sum(axis=0))


def check_all_reduce_operations(world):
    for op, reference in (
        (dist.ReduceOp.SUM, np.sum),
        (dist.ReduceOp.PRODUCT, np.prod),
        (dist.ReduceOp.MIN, np.min),
        (dist.ReduceOp.MAX, np.max),
    ):
        tensor = contribution(world.rank, 100)
        dist.all_reduce(tensor, op)
        require_equal(tensor, reference(contributions(world, 100), axis=0))


def check_all_reduce_bitwise(world):
    everyone = contributions(world, 100, torch.int32).astype(np.int64)
    for op, reference in (
        (dist.ReduceOp.BAND, np.bitwise_and),
        (dist.ReduceOp.BOR, np.bitwise_or),
        (dist.ReduceOp.BXOR, np.bitwise_xor),
    ):
        tensor = contribution(world.rank, 100, torch.int32)
        dist.all_reduce(tensor, op)
        require_equal(tensor, reference.reduce(everyone, axis=0))


def check_all_reduce_complex(world):
    tensor = torch.complex(contribution(world.rank, 9), contribution(world.rank, 9, seed=1))
    dist.all_reduce(tensor)
    require_equal(tensor.real, contributions(world, 9).sum(axis=0))
    require_equal(tensor.imag, contributions(world, 9, seed=1).sum(axis=0))


def check_all_reduce_sparse(world):
    indices = torch.tensor([[world.rank, 4, 4]])
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [world.rank, 0.0]])
    tensor = torch.sparse_coo_tensor(indices, values, (6, 2))
    dense = np.zeros((6, 2))
    for rank in range(world.size):
        dense[rank] += [1, 2]
        dense[4] += [3 + rank, 4]
    dist.all_reduce(tensor)
    assert tensor.is_sparse
    require_equal(tensor.to_dense(), dense)


def check_all_reduce_of_a_leaf_that_requires_grad(world):
    tensor = torch.full((5,), float(world.rank), requires_grad=True)
    dist.all_reduce(tensor.detach())
    require_equal(tensor.detach(), np.full(5, sum(range(world.size))))


def check_all_reduce_coalesced(world):
    tensors = [contribution(world.rank, length, seed=length) for length in (3, 0, 500)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor, length in zip(tensors, (3, 0, 500), strict=True):
        require_equal(tensor, contributions(world, length, seed=length).sum(axis=0))


def check_all_reduce_async(world):
    tensors = [contribution(world.rank, 1000, seed=seed) for seed in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    for seed, tensor in enumerate(tensors):
        require_equal(tensor, contributions(world, 1000, seed=seed).sum(axis=0))


def check_blocking_call_behind_async_ones(world):
    tensors = [contribution(world.rank, 3000, seed=seed) for seed in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = contribution(world.rank, 3)
    dist.all_reduce(last)
    require_equal(last, contributions(world, 3).sum(axis=0))
    for seed, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        require_equal(tensor, contributions(world, 3000, seed=seed).sum(axis=0))


def check_scalar_tensors(world):
    tensor = torch.tensor(1.0 + world.rank)
    dist.all_reduce(tensor)
    assert tensor.item() == sum(range(1, world.size + 1))
    pieces = [torch.tensor(0.0) for _ in range(world.size)]
    dist.all_gather(pieces, torch.tensor(float(world.rank)))
    assert [piece.item() for piece in pieces] == list(range(world.size))


def check_gathered_and_scattered_in_place(world):
    whole = torch.zeros(4 * world.size)
    mine = slice(4 * world.rank, 4 * (world.rank + 1))
    whole[mine] = world.rank
    dist.all_gather_into_tensor(whole, whole[mine])
    require_equal(whole, np.repeat(np.arange(world.size), 4))
    dist.reduce_scatter_tensor(whole[mine], whole)
    require_equal(whole[mine], np.full(4, world.rank * world.size))


def check_future_and_then(world):
    tensor = contribution(world.rank, 50)
    work = dist.all_reduce(tensor, async_op=True)
    halved = work.get_future().then(lambda future: future.value()[0] / 2)
    require_equal(halved.wait(), contributions(world, 50).sum(axis=0) / 2)


def check_broadcast(world):
    for source in range(world.size):
        for dtype in (*DTYPES, torch.bool):
            tensor = contribution(world.rank, 33, dtype)
            dist.broadcast(tensor, source)
            require_equal(tensor, contribution(source, 33, dtype).numpy())


def check_reduce(world):
    for target in range(world.size):
        tensor = contribution(world.rank, 200)
        dist.reduce(tensor, target)
        if world.rank == target:
            require_equal(tensor, contributions(world, 200).sum(axis=0))


def check_all_gather(world):
    for length in LENGTHS:
        pieces = [torch.empty(length) for _ in range(world.size)]
        dist.all_gather(pieces, contribution(world.rank, length))
        for rank, piece in enumerate(pieces):
            require_equal(piece, contribution(rank, length).numpy())


def check_all_gather_into_tensor(world):
    for length in LENGTHS:
        flat = torch.empty(world.size * length)
        dist.all_gather_into_tensor(flat, contribution(world.rank, length))
        require_equal(flat, contributions(world, length).reshape(-1))


def check_all_gather_into_tensor_coalesced(world):
    outputs = [torch.empty(world.size * length) for length in (5, 300)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for output, length in zip(outputs, (5, 300), strict=True):
            dist.all_gather_into_tensor(output, contribution(world.rank, length))
    manager.wait()
    for output, length in zip(outputs, (5, 300), strict=True):
        require_equal(output, contributions(world, length).reshape(-1))


def check_reduce_scatter(world):
    pieces = [contribution(world.rank, 40, seed=target) for target in range(world.size)]
    output = torch.empty(40)
    dist.reduce_scatter(output, pieces)
    require_equal(output, contributions(world, 40, seed=world.rank).sum(axis=0))


def check_reduce_scatter_tensor(world):
    for length in LENGTHS:
        source = contribution(world.rank, world.size * length)
        output = torch.empty(length)
        dist.reduce_scatter_tensor(output, source)
        total = contributions(world, world.size * length).sum(axis=0)
        require_equal(output, total.reshape(world.size, length)[world.rank])
        require_equal(source, contribution(world.rank, world.size * length).numpy())


def check_reduce_scatter_tensor_coalesced(world):
    lengths = (4, 100)
    outputs = [torch.empty(length) for length in lengths]
    with dist.distributed_c10d._coalescing_manager():
        for output, length in zip(outputs, lengths, strict=True):
            source = contribution(world.rank, world.size * length)
            dist.reduce_scatter_tensor(output, source, dist.ReduceOp.SUM)
    for output, length in zip(outputs, lengths, strict=True):
        total = contributions(world, world.size * length).sum(axis=0)
        require_equal(output, total.reshape(world.size, length)[world.rank])


def check_all_to_all_single(world):
    for length in LENGTHS:
        output = torch.empty(world.size * length)
        dist.all_to_all_single(output, contribution(world.rank, world.size * length))
        everyone = contributions(world, world.size * length)
        pieces = everyone.reshape(world.size, world.size, length)[:, world.rank]
        require_equal(output, pieces.reshape(-1))


def check_all_to_all_single_uneven(world):
    # Rank s sends s + d rows of two columns to rank d.
    sizes = [[s + d for d in range(world.size)] for s in range(world.size)]
    sources = [torch.arange(2.0 * sum(row)).reshape(-1, 2) + 100 * s for s, row in enumerate(sizes)]
    received = [row[world.rank] for row in sizes]
    output = torch.empty(sum(received), 2)
    dist.all_to_all_single(output, sources[world.rank], received, sizes[world.rank])
    expected = [sources[s].split(sizes[s])[world.rank] for s in range(world.size)]
    require_equal(output, torch.cat(expected).numpy())


def check_scatter(world):
    for source in range(world.size):
        pieces = [contribution(source, 21, seed=target) for target in range(world.size)]
        output = torch.empty(21)
        dist.scatter(output, pieces if world.rank == source else None, source)
        require_equal(output, contribution(source, 21, seed=world.rank).numpy())


def check_gather(world):
    for target in range(world.size):
        pieces = [torch.empty(21) for _ in range(world.size)] if world.rank == target else None
        dist.gather(contribution(world.rank, 21), pieces, target)
        for rank, piece in enumerate(pieces or []):
            require_equal(piece, contribution(rank, 21).numpy())


def check_barrier(world):
    dist.barrier()
    dist.barrier(async_op=True).wait()


def check_objects(world):
    everyone = [None] * world.size
    dist.all_gather_object(everyone, {"rank": world.rank, "text": "x" * 100 * world.rank})
    assert [entry["rank"] for entry in everyone] == list(range(world.size))
    assert [len(entry["text"]) for entry in everyone] == [100 * r for r in range(world.size)]
    pair = [{"from": 1}, (1, "two")] if world.rank == 1 else [None, None]
    dist.broadcast_object_list(pair, src=1)
    assert pair == [{"from": 1}, (1, "two")]
    received = [None]
    dist.scatter_object_list(
        received, [f"for {r}" for r in range(world.size)] if world.rank == 0 else None, src=0
    )
    assert received == [f"for {world.rank}"]
    collected = [None] * world.size if world.rank == 1 else None
    dist.gather_object(world.rank**2, collected, dst=1)
    assert collected in (None, [0, 1, 4])
