"""Groups with unisono for CPUs and another backend for another device, listed in both orders.

The last case is torch's own group of both devices, whose behavior is the reference.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_backend.on_device import DEVICE, on_device, zeros
from unisono.errors import MismatchError, UnsupportedError
from unisono.torch_backend import Options, reserved
from unisono.torch_backend.process_group import ProcessGroup
from worlds.torch_version import needs_torch

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("xpu:gloo,cpu:unisono", "cpu:unisono,xpu:gloo", "cpu:gloo,xpu:gloo")


def test_mixed(outcome):
    outcome.require_success()


def memory_of(tensors):
    return [tensor.memory.tolist() for tensor in tensors]


def require_both(group, total):
    """Asserts that the sum of 1 + rank over a group is `total`, on both devices."""
    number = 1.0 + dist.get_rank()
    on_cpu, elsewhere = torch.tensor([number]), on_device(number)
    dist.all_reduce(on_cpu, group=group)
    dist.all_reduce(elsewhere, group=group)
    assert on_cpu.item() == elsewhere.memory.item() == total


def check_properties_of_the_group(world):
    group = dist.group.WORLD
    assert {device.type for device in group._device_types} == {"cpu", "xpu"}
    assert dist.get_backend() == dist.get_backend_config() == world.backend
    assert isinstance(group._get_backend(DEVICE), dist.ProcessGroupGloo)
    assert group._get_backend(DEVICE).size() == world.size
    assert dist.get_pg_count() == len(dist.distributed_c10d._world.pg_map) == 1
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group


def check_reductions(world):
    rank, size = world.rank, world.size
    require_both(None, 10.0)
    tensor = on_device(rank, rank)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True).wait()
    assert tensor.memory.tolist() == [3, 3]
    tensor = on_device(1.0)
    dist.reduce(tensor, 2)
    assert rank != 2 or tensor.memory.item() == size
    piece = zeros(1)
    dist.reduce_scatter_tensor(piece, on_device(0.0, 1.0, 2.0, 3.0))
    assert piece.memory.item() == size * rank
    dist.reduce_scatter(piece, [on_device(2.0 * r) for r in range(size)])
    assert piece.memory.item() == 2 * size * rank
    tensors = [on_device(float(rank)), on_device(1.0)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert memory_of(tensors) == [[6.0], [4.0]]


def check_movement(world):
    rank, size = world.rank, world.size
    tensor = on_device(rank)
    dist.broadcast(tensor, 3)
    assert tensor.memory.item() == 3
    pieces = [zeros(1) for _ in range(size)]
    dist.all_gather(pieces, on_device(float(rank)))
    assert memory_of(pieces) == [[0.0], [1.0], [2.0], [3.0]]
    together = zeros(size)
    dist.all_gather_into_tensor(together, on_device(2.0 * rank))
    assert together.memory.tolist() == [0.0, 2.0, 4.0, 6.0]
    pieces = [zeros(1) for _ in range(size)] if rank == 1 else None
    dist.gather(on_device(float(rank)), pieces, 1)
    assert rank != 1 or memory_of(pieces) == [[0.0], [1.0], [2.0], [3.0]]
    piece = zeros(1)
    dist.scatter(piece, [on_device(3.0 * r) for r in range(size)] if rank == 0 else None, 0)
    assert piece.memory.item() == 3.0 * rank
    dist.all_to_all_single(together, on_device(*(10.0 * rank + r for r in range(size))))
    assert together.memory.tolist() == [10.0 * r + rank for r in range(size)]


def check_messages(world):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    incoming, on_cpu = zeros(1), torch.zeros(1)
    operations = [
        dist.P2POp(dist.isend, on_device(float(world.rank)), right),
        dist.P2POp(dist.isend, torch.tensor([5.0]), right),
        dist.P2POp(dist.irecv, incoming, left),
        dist.P2POp(dist.irecv, on_cpu, left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert incoming.memory.item() == left and on_cpu.item() == 5.0
    if world.rank == 0:
        dist.send(on_device(1.5), 1)
    elif world.rank == 1:
        assert dist.recv(incoming) == 0
        assert incoming.memory.item() == 1.5


def check_objects_and_barriers(world):
    seen = [None] * world.size
    dist.all_gather_object(seen, {"rank": world.rank})
    assert [one["rank"] for one in seen] == [0, 1, 2, 3]
    dist.barrier()


def check_functional_collectives(world):
    total = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert (total + 0).tolist() == [4.0, 4.0]


def check_new_groups(world):
    pair = [world.rank // 2 * 2, world.rank // 2 * 2 + 1]
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[world.rank // 2]
    require_both(mine, 3.0 + 4.0 * (world.rank // 2))
    assert dist.get_backend_config(mine) == world.backend
    dist.destroy_process_group(mine)
    local = dist.new_group(pair, use_local_synchronization=True)
    require_both(local, 3.0 + 4.0 * (world.rank // 2))
    dist.destroy_process_group(local)


@contextmanager
def bound_to_device():
    """Binds a group to the accelerator `DEVICE`, as `init_process_group(device_id=...)` does."""
    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: DEVICE)
        group.bound_device_id = DEVICE
        yield
    group.bound_device_id = None


def own_torchs_split_of_groups_bound_to_a_device(world):
    # With Gloo only, this sometimes hangs, since torch gives all groups of a split the same name,
    # and Gloo's ranks find each other by name.
    needs_torch("2.13", "its split_group asks for the backend of CUDA, whatever the accelerator")
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    with bound_to_device():
        halves = [[0, 1], [2, 3]]
        half = dist.split_group(split_ranks=halves, pg_options=options)
        require_both(half, 3.0 + 4.0 * (world.rank // 2))
        assert half.bound_device_id == DEVICE
        assert dist.get_backend(half) == world.backend
        names = ("data", "tensor")
        mesh = init_device_mesh(
            "xpu", (2, 2), mesh_dim_names=names, backend_override=dict.fromkeys(names, options)
        )
        require_both(mesh.get_group("tensor"), 3.0 + 4.0 * (world.rank // 2))


def own_new_groups_of_another_kind(world):
    assert type(dist.new_group(backend="unisono")) is ProcessGroup
    assert type(dist.new_group(backend="gloo")) is dist.ProcessGroup
    for backend in ("xpu:gloo,cpu:unisono", "cpu:unisono,xpu:gloo"):
        require_both(dist.new_group(backend=backend), 10.0)
    reproducible = Options(reproducible=True)
    group = dist.new_group(backend="cpu:unisono,xpu:gloo", pg_options=reproducible)
    assert group.communicator.reproducible
    require_both(group, 10.0)


def own_split_group(world):
    part = reserved.split_group(split_ranks=[[0, 2], [1]])
    if world.rank == 3:
        assert part is None
        return
    assert dist.get_backend(part) == world.backend
    require_both(part, 2.0 if world.rank == 1 else 4.0)
    again = reserved.split_group(part, [[0]])
    if dist.get_rank(part) == 0:
        require_both(again, 1.0 + world.rank)
    dist.destroy_process_group(part)


def own_split_group_sorts_the_ranks_on_every_device(world):
    part = dist.group.WORLD.split_group([1, 0], timedelta(seconds=7))
    if world.rank < 2:
        assert part.communicator.timeout_s == 7
        assert part.rank() == part._get_backend(DEVICE).rank() == world.rank


def own_split_group_for_some_devices(world):
    group = dist.group.WORLD
    elsewhere = group.split_group([0, 1], device_types=[DEVICE])
    on_cpu = group.split_group([0, 1], device_types=[torch.device("cpu")])
    if world.rank > 1:
        assert elsewhere is on_cpu is None
        return
    assert [device.type for device in elsewhere._device_types] == ["xpu"]
    assert type(on_cpu) is ProcessGroup
    tensor = on_device(1.0)
    elsewhere.allreduce([tensor]).wait()
    assert tensor.memory.item() == 2.0


def own_shrink_group(world):
    group = dist.new_group()
    if world.rank != 3:
        shrunk = reserved.shrink_group([3], group)
        assert dist.get_backend(shrunk) == world.backend
        require_both(shrunk, 6.0)


def check_device_mesh(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    require_both(mesh.get_group("tensor"), 3.0 + 4.0 * (world.rank // 2))
    require_both(mesh.get_group("data"), 4.0 + 2.0 * (world.rank % 2))


def small_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def check_fully_shard_and_checkpoint(world):
    mesh = init_device_mesh("cpu", (world.size,))
    model, alone = fully_shard(small_model(), mesh=mesh), small_model()
    inputs = torch.arange(32.0).reshape(4, 8) / 32
    alone(inputs).square().mean().backward()
    model(inputs[world.rank :][:1]).square().mean().backward()
    for name, value in model.named_parameters():
        expected = dict(alone.named_parameters())[name].grad
        torch.testing.assert_close(value.grad.full_tensor(), expected)
    folder = world.folder / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}-later").result()
    for place in (folder, f"{folder}-later"):
        loaded = {"model": fully_shard(small_model().apply(_zero), mesh=mesh).state_dict()}
        dcp.load(loaded, checkpoint_id=place)
        for name, value in loaded["model"].items():
            assert torch.equal(value.full_tensor(), alone.state_dict()[name])


def _zero(module):
    for value in module.parameters(recurse=False):
        value.data.zero_()


def check_data_parallel(world):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 20))
    model(torch.ones(4, 30) * world.rank).sum().backward()
    assert (model.module.weight.grad == 6.0).all()


def own_device_that_no_backend_serves(world):
    group = dist.new_group()
    text = "allreduce: .* tensors on meta; the group has unisono for cpu, gloo for xpu"
    # all ranks refuse the call, so the group stays usable
    with pytest.raises(UnsupportedError, match=text):
        dist.all_reduce(torch.empty(2, device="meta"), group=group)
    if world.rank == 1:
        with pytest.raises(UnsupportedError, match=text):
            dist.all_reduce(torch.empty(2, device="meta"), group=group)
    else:
        with pytest.raises(MismatchError, match=r"rank 1.*serves tensors on meta"):
            dist.all_reduce(torch.ones(2), group=group)
