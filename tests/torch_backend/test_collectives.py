"""Every collective through torch.distributed, against NumPy."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import distributed as dist

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


def contribution(rank, length, dtype=torch.float32, seed=0):
    """What `rank` contributes: small integers, so that sums are exact in every type."""
    generator = np.random.default_rng([rank, length, seed])
    return torch.from_numpy(generator.integers(0, 5, length)).to(dtype)


def contributions(world, length, dtype=torch.float32, seed=0):
    return np.stack(
        [contribution(r, length, dtype, seed).to(torch.float64).numpy() for r in range(world.size)]
    )


def require_equal(actual, expected):
    expected = torch.as_tensor(np.asarray(expected))
    torch.testing.assert_close(actual.to(expected.dtype).cpu(), expected, rtol=1e-5, atol=1e-5)


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


def own_all_to_all_lists_of_any_length(world):
    sources = [contribution(world.rank, 3 * target, seed=target) for target in range(world.size)]
    outputs = [torch.empty(3 * world.rank) for _ in range(world.size)]
    dist.all_to_all(outputs, sources)
    for rank, output in enumerate(outputs):
        require_equal(output, contribution(rank, 3 * world.rank, seed=world.rank).numpy())


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
    dist.barrier(timeout=timedelta(seconds=9))
    group.monitored_barrier(timedelta(seconds=9))
