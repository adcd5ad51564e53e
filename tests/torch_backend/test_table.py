"""Every collective with every element type, layout and reduction, compared with NumPy and gloo.

Both backends serve the same world: unisono is the default group, and gloo a second group. In cases
that gloo supports, both must give equal results. Other cases are compared with NumPy only.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed.nn.functional as dist_nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from torch_backend.contributions import contribution, contributions, require_equal
from unisono.torch_backend import _devices, all_gather_single, reduce_scatter_single
from worlds.torch_version import needs_torch

pytestmark = pytest.mark.torch
RANKS = 3

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
ONLY_MOVED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
ALL = (*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool, *ONLY_MOVED)
GLOO = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)

REDUCTIONS = {
    dist.ReduceOp.SUM: (np.add, (*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX)),
    # torch refuses products of complex numbers
    dist.ReduceOp.PRODUCT: (np.multiply, (*FLOATS, *INTEGERS, *UNSIGNED)),
    dist.ReduceOp.MIN: (np.minimum, (*FLOATS, *INTEGERS, *UNSIGNED)),
    dist.ReduceOp.MAX: (np.maximum, (*FLOATS, *INTEGERS, *UNSIGNED)),
    dist.ReduceOp.BAND: (np.bitwise_and, (*INTEGERS, *UNSIGNED, torch.bool)),
    dist.ReduceOp.BOR: (np.bitwise_or, (*INTEGERS, *UNSIGNED, torch.bool)),
    dist.ReduceOp.BXOR: (np.bitwise_xor, (*INTEGERS, *UNSIGNED, torch.bool)),
}
GLOO_REDUCES = {
    dist.ReduceOp.SUM: GLOO,
    dist.ReduceOp.PRODUCT: GLOO,
    dist.ReduceOp.MIN: GLOO,
    dist.ReduceOp.MAX: GLOO,
    dist.ReduceOp.BAND: (torch.int32, torch.int64),
    dist.ReduceOp.BOR: (torch.int32, torch.int64),
    dist.ReduceOp.BXOR: (torch.int32, torch.int64),
}


def test_table(outcome):
    outcome.require_success()


# ---- functions that the checks use


def made(world, dtype, shape, rank=None, seed=0):
    """Returns a rank's random contribution of small integers, which every type can represent."""
    generator = np.random.default_rng([world.rank if rank is None else rank, seed])
    count = int(np.prod(shape))
    numbers = torch.from_numpy(generator.integers(0, 2 if dtype is torch.bool else 5, count))
    return numbers.to(torch.float32).to(dtype).reshape(shape)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def require_same(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


LAYOUTS = {
    "plain": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "offset": lambda t: torch.cat([t.new_zeros(1, t.size(1)), t])[1:],
}


def moves(world, dtype, layout, group):
    """Runs every collective that only moves data, on tensors of this type and layout."""
    arrange, shape, ranks = LAYOUTS[layout], (4, 6), range(world.size)
    everyone = [made(world, dtype, shape, rank) for rank in ranks]
    mine, sized = (
        everyone[world.rank],
        lambda: [arrange(torch.zeros(shape).to(dtype)) for _ in ranks],
    )

    tensor = arrange(mine)
    dist.broadcast(tensor, 1, group=group)
    require_same(tensor, everyone[1])
    pieces = sized()
    dist.all_gather(pieces, arrange(mine), group=group)
    for piece, expected in zip(pieces, everyone, strict=True):
        require_same(piece, expected)
    pieces = sized() if world.rank == 2 else None
    dist.gather(arrange(mine), pieces, 2, group=group)
    for piece, expected in zip(pieces or [], everyone, strict=world.rank == 2):
        require_same(piece, expected)
    output = sized()[0]
    dist.scatter(
        output, [arrange(t) for t in everyone] if world.rank == 0 else None, 0, group=group
    )
    require_same(output, mine)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    work, output = dist.isend(arrange(mine), right, group=group), sized()[0]
    dist.recv(output, left, group=group)
    work.wait()
    require_same(output, everyone[left])
    if layout == "plain":
        output = torch.zeros(4 * world.size, 6).to(dtype)
        all_gather_single(output, mine, group=group)
        require_same(output, torch.cat([t.float() for t in everyone]).to(dtype))
        given = torch.cat([mine.float()] * 3).to(dtype)
        dist.all_to_all_single(output, given, group=group)
        require_same(output, torch.cat([t.float() for t in everyone]).to(dtype))


def _moving(dtype):
    def check(world):
        for layout in LAYOUTS:
            moves(world, dtype, layout, None)
        pieces = [torch.zeros(rank + 2).to(dtype) for rank in range(world.size)]
        if world.rank == 0:
            sent = [made(world, dtype, (2,), seed=target) for target in range(world.size)]
        else:
            sent = [made(world, dtype, (2 + world.rank,), seed=t) for t in range(world.size)]
        pieces = [torch.zeros(2 + rank).to(dtype) for rank in range(world.size)]
        dist.all_to_all(pieces, sent)
        for rank, piece in enumerate(pieces):
            require_same(piece, made(world, dtype, (2 + rank,), rank, seed=world.rank))
        if dtype in GLOO:
            moves(world, dtype, "plain", _gloo())

    return check


_gloo_beside = {}


def _gloo():
    """Returns the gloo group of the default group. Makes a new one after a failed check."""
    if dist.group.WORLD not in _gloo_beside:
        _gloo_beside[dist.group.WORLD] = dist.new_group(backend="gloo")
    return _gloo_beside[dist.group.WORLD]


def reduces(world, dtype, op, reference, group):
    shape, ranks = (3, 5), range(world.size)
    everyone = [_numbers(made(world, dtype, shape, rank)) for rank in ranks]
    expected = torch.from_numpy(np.asarray(reference.reduce(np.stack(everyone), axis=0)))
    expected = expected.to(dtype)
    tensor = made(world, dtype, shape)
    dist.all_reduce(tensor, op, group=group)
    require_same(tensor, expected)
    tensor = made(world, dtype, shape)
    dist.reduce(tensor, 1, op, group=group)
    if world.rank == 1:
        require_same(tensor, expected)
    output = torch.empty(shape, dtype=dtype)
    dist.reduce_scatter(output, [made(world, dtype, shape) for _ in ranks], op, group=group)
    require_same(output, expected)
    rows = torch.empty(1, 5, dtype=dtype)
    reduce_scatter_single(rows, made(world, dtype, shape), op, group=group)
    require_same(rows, expected[world.rank : world.rank + 1])


def _numbers(tensor):
    """Returns a tensor as a NumPy array, in a wider type if NumPy lacks the tensor's type."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _reducing(op):
    reference, dtypes = REDUCTIONS[op]

    def check(world):
        for dtype in dtypes:
            reduces(world, dtype, op, reference, None)
            if dtype in GLOO_REDUCES[op]:
                reduces(world, dtype, op, reference, _gloo())

    return check


for _dtype in ALL:
    globals()[f"own_{str(_dtype).removeprefix('torch.')}_moves"] = _moving(_dtype)
for _op in REDUCTIONS:
    globals()[f"own_{str(_op).rpartition('.')[2].lower()}_reduces"] = _reducing(_op)


# ---- shapes and kinds of tensors


def check_zero_sized_and_scalar_tensors(world):
    for shape in ((0,), (3, 0), ()):
        tensor = torch.ones(shape)
        dist.all_reduce(tensor)
        require_same(tensor, torch.full(shape, float(world.size)))
        dist.broadcast(tensor, 0)
        pieces = [torch.zeros(shape) for _ in range(world.size)]
        dist.all_gather(pieces, tensor)
        require_same(pieces[-1], tensor)


def own_channels_last_keeps_its_layout(world):
    tensor = made(world, torch.float32, (2, 3, 4, 5)).to(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    total = sum(made(world, torch.float32, (2, 3, 4, 5), rank) for rank in range(world.size))
    require_same(tensor, total)


def check_inference_mode_and_gradients_wanted(world):
    with torch.inference_mode():
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 4
    wanted = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        dist.broadcast(wanted, 0)
        gathered = [torch.empty(4) for _ in range(world.size)]
        dist.all_gather(gathered, wanted)
    assert wanted.requires_grad and wanted.is_leaf and wanted.grad_fn is None


def own_quantised_integers_move_as_integers(world):
    tensor = torch.quantize_per_tensor(torch.arange(4.0) + world.rank, 0.5, 1, torch.quint8)
    held = tensor.int_repr()
    dist.broadcast(held, 2)
    wanted = torch.quantize_per_tensor(torch.arange(4.0) + 2, 0.5, 1, torch.quint8).int_repr()
    require_same(held, wanted)


def own_sparse_sums_of_any_shape(world):
    for shape, dense_dims in (((5,), 0), ((4, 3), 0), ((4, 3), 1), ((3, 2, 2), 1)):
        for count in (0, 1, 4):
            sparse_dims = len(shape) - dense_dims
            generator = np.random.default_rng([world.rank, count])
            rows = [generator.integers(0, extent, count) for extent in shape[:sparse_dims]]
            values = torch.ones(count, *shape[sparse_dims:], dtype=torch.float64) * (1 + world.rank)
            mine = torch.sparse_coo_tensor(
                torch.from_numpy(np.stack(rows)), values, shape, dtype=torch.float64
            )
            everyone = [torch.zeros(shape, dtype=torch.float64) for _ in range(world.size)]
            dist.all_gather(everyone, mine.to_dense())
            dist.all_reduce(mine)
            torch.testing.assert_close(mine.to_dense(), sum(everyone))


# ---- names, queries and conventions


def check_queries_about_groups(world):
    assert dist.is_initialized() and dist.is_backend_available(world.backend)
    assert dist.get_pg_count() >= 1
    served = ",".join(f"{device}:{world.backend}" for device in _devices())
    assert dist.get_backend_config() == served or "gloo" in world.backend
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    group = dist.new_group([0, 2])
    if world.rank != 1:
        assert dist.get_global_rank(group, 1) == 2
        assert dist.get_process_group_ranks(group) == [0, 2]
        dist.barrier(group)
    tensor = contribution(world.rank, 4)
    with pytest.warns(FutureWarning):
        dist.all_reduce(tensor, dist.reduce_op.SUM)
    require_equal(tensor, contributions(world, 4).sum(axis=0))


def own_names_of_nccl(world):
    assert dist.supports_complex(dist.ReduceOp.SUM)
    factor = torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
    tensor = torch.ones(4)
    dist.all_reduce(tensor, factor)
    assert tensor.tolist() == [1.5] * 4
    dist.barrier(device_ids=[0])


def own_group_of_the_default_backend(world):
    group = dist.new_group(backend=None)
    assert dist.get_backend(group) == "unisono"
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [3.0] * 2


def check_functional_collectives_in_place(world):
    group, mine = dist.group.WORLD, torch.arange(6.0) + world.rank
    everyone = [torch.arange(6.0) + rank for rank in range(world.size)]
    total, shares = sum(everyone), [2] * world.size
    cut = torch.cat([e.chunk(world.size)[world.rank] for e in everyone])
    output = torch.empty(6)
    functional.all_to_all_inplace(output, mine, shares, shares, group=group)
    require_same(output, cut)
    whole = torch.empty(6 * world.size)
    functional.all_gather_tensor_inplace(whole, mine, group)
    require_same(whole, torch.cat(everyone))
    pieces = [torch.empty(6) for _ in everyone]
    functional.all_gather_inplace(pieces, mine, group)
    require_same(torch.cat(pieces), torch.cat(everyone))
    share = torch.empty(2)
    functional.reduce_scatter_tensor_inplace(share, mine, group=group)
    require_same(share, total.chunk(world.size)[world.rank])
    functional.all_reduce_inplace(mine, group=group)
    require_same(mine, total)


def check_collectives_by_their_newest_names(world):
    needs_torch("2.13", "it has no collectives of these names")
    mine = torch.arange(6.0) + world.rank
    everyone = [torch.arange(6.0) + rank for rank in range(world.size)]
    whole, share = torch.empty(6 * world.size), torch.empty(6 // world.size)
    dist.all_gather_single(whole, mine)
    require_same(whole, torch.cat(everyone))
    dist.reduce_scatter_single(share, mine)
    require_same(share, sum(everyone).chunk(world.size)[world.rank])


def own_functions_of_torch_2_15(world):
    needs_torch("2.15", "it does not have these functions")
    mine, everyone = torch.arange(3.0) + world.rank, torch.arange(world.size)
    whole = torch.zeros(2, 3 * world.size)
    outputs = whole if world.rank == 1 else (None, None)
    dist.gather_single(mine, outputs[0], 1)
    dist.gather_into_tensor(mine, outputs[1], 1, async_op=True).wait()
    if world.rank == 1:
        expected = (torch.arange(3.0) + everyone[:, None]).flatten()
        require_same(whole[0], expected)
        require_same(whole[1], expected)
    dist.set_timeout(timedelta(seconds=31))
    share, pieces = torch.empty(3), [mine + rank for rank in range(world.size)]
    functional.reduce_scatter_inplace(share, pieces)
    require_same(
        share, sum(torch.arange(3.0) + rank for rank in everyone) + world.size * world.rank
    )
    reduced = functional.all_reduce_coalesced([mine, mine + 1], "sum", dist.group.WORLD)
    first, second = functional.wait_tensors(reduced)
    require_same(second, first + world.size)


def check_functional_collectives_by_their_newest_names(world):
    needs_torch("2.13", "it has no functional collectives of these names")
    group, mine = dist.group.WORLD, torch.arange(6.0) + world.rank
    everyone = [torch.arange(6.0) + rank for rank in range(world.size)]
    whole, share = torch.cat(everyone), sum(everyone).chunk(world.size)[world.rank]
    for gather in (functional.all_gather_single, functional.all_gather_single_autograd):
        require_same(gather(mine, 0, group) + 0, whole)
    for scatter in (functional.reduce_scatter_single, functional.reduce_scatter_single_autograd):
        require_same(scatter(mine, "sum", 0, group) + 0, share)
    (gathered,) = functional.all_gather_single_coalesced([mine], group)
    (scattered,) = functional.reduce_scatter_single_coalesced([mine], "sum", [0], group)
    require_same(gathered + 0, whole)
    require_same(scattered + 0, share)


def check_functional_messages_in_place(world):
    needs_torch("2.13", "it has no functional messages")
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    incoming = torch.empty(3)
    works = [
        functional.irecv_inplace(incoming, left, group=dist.group.WORLD),
        functional.isend_inplace(
            torch.full((3,), float(world.rank)), right, group=dist.group.WORLD
        ),
    ]
    for work in works:
        functional.wait_tensor(work)
    assert incoming.tolist() == [float(left)] * 3


def check_collectives_of_distributed_nn(world):
    mine = torch.full((3, 2), 1.0 + world.rank, requires_grad=True)
    everyone = [torch.full((3, 2), 1.0 + rank) for rank in range(world.size)]
    total = sum(everyone)
    weight = 1.0 + world.rank
    for result, expected in (
        (dist_nn.broadcast(mine, 1), everyone[1]),
        (torch.stack(dist_nn.all_gather(mine)), torch.stack(everyone)),
        (dist_nn.reduce_scatter(torch.empty(3, 2), [mine] * world.size), total),
        (torch.stack(dist_nn.all_to_all([torch.empty(3, 2)] * 3, [mine] * 3)), None),
        (dist_nn.all_to_all_single(torch.empty(3, 2), mine), torch.cat([e[:1] for e in everyone])),
    ):
        if expected is not None:
            torch.testing.assert_close(result.detach(), expected)
        mine.grad = None
        (result * weight).sum().backward()
        assert mine.grad is not None and mine.grad.isfinite().all()
    reduced = dist_nn.reduce(mine.clone(), 0)
    gathered = dist_nn.gather(mine, 2)
    scattered = dist_nn.scatter([mine] * world.size, 1)
    if world.rank == 0:
        torch.testing.assert_close(reduced.detach(), total)
    if world.rank == 2:
        torch.testing.assert_close(torch.stack(gathered).detach(), torch.stack(everyone))
    torch.testing.assert_close(scattered.detach(), everyone[1])
