"""Point-to-point messages, groups of ranks, and device meshes through torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from group_resources import mappings, open_files
from unisono.errors import AbortedError, CollectiveTimeoutError, MismatchError, UnsupportedError
from unisono.torch_backend import reserved
from worlds.world_rank import STAND_IN

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono", "gloo", STAND_IN)


def test_groups(outcome):
    outcome.require_success()


def message(source, target, length=17):
    return torch.arange(float(length)) + 100 * source + 1000 * target


def check_send_and_recv(world):
    for source in range(world.size):
        target = (source + 1) % world.size
        if world.rank == source:
            dist.send(message(source, target), target)
        elif world.rank == target:
            tensor = torch.empty(17)
            assert dist.recv(tensor, source) == source
            assert torch.equal(tensor, message(source, target))


def check_large_messages_in_both_directions(world):
    other = world.rank ^ 1
    incoming = torch.empty(300_000)
    work = dist.isend(message(world.rank, other, 300_000), other)
    dist.recv(incoming, other)
    work.wait()
    assert torch.equal(incoming, message(other, world.rank, 300_000))


def check_tags_choose_the_message(world):
    if world.rank == 0:
        works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in (5, 6, 7)]
        for work in works:
            work.wait()
    elif world.rank == 1:
        for tag in (7, 5, 6):
            tensor = torch.empty(3)
            dist.recv(tensor, 0, tag=tag)
            assert tensor.tolist() == [tag] * 3


def check_recv_from_any_rank(world):
    if world.rank == 0:
        seen = set()
        for _ in range(world.size - 1):
            tensor = torch.empty(2)
            source = dist.recv(tensor)
            assert tensor.tolist() == [source, source]
            seen.add(source)
        assert seen == {1, 2, 3}
    else:
        dist.send(torch.full((2,), float(world.rank)), 0)


def check_batch_isend_irecv(world):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for length in (1, 200_000):
        incoming = torch.empty(length)
        operations = [
            dist.P2POp(dist.irecv, incoming, left),
            dist.P2POp(dist.isend, message(world.rank, right, length), right),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(incoming, message(left, world.rank, length))


def check_objects_between_two_ranks(world):
    if world.rank == 0:
        dist.send_object_list([{"a": 1}, "b"], dst=3)
    elif world.rank == 3:
        received = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == [{"a": 1}, "b"]


def check_new_groups_and_their_ranks(world):
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = (even, odd)[world.rank % 2]
    tensor = torch.tensor([float(world.rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == (2.0, 4.0)[world.rank % 2]
    tensor = torch.tensor([float(world.rank)])
    dist.broadcast(tensor, src=2 + world.rank % 2, group=mine)
    assert tensor.item() == 2 + world.rank % 2
    assert dist.get_group_rank(mine, world.rank) == world.rank // 2
    dist.destroy_process_group(mine)
    dist.barrier()


def own_destroyed_group_frees_its_memory(world):
    before = mappings(), open_files()
    group, tensor = dist.new_group(), torch.ones(100_000)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    future = work.get_future()
    work.wait()
    never = dist.irecv(torch.ones(4), world.rank ^ 1, group=group)
    assert mappings() == before[0] + 1 and open_files() > before[1]
    dist.destroy_process_group(group)
    assert (mappings(), open_files()) == before
    assert work.is_success() and future.wait() == [tensor] and tensor[0] == world.size
    with pytest.raises(AbortedError):
        never.wait()
    with pytest.raises(AbortedError, match="this communicator is closed"):
        group.allreduce([tensor]).wait()
    dist.barrier()


def check_works_of_two_groups_interleave(world):
    pair, everyone = dist.new_subgroups(2)[0], dist.group.WORLD
    works, tensors = [], []
    for _ in range(5):
        for group in (everyone, pair):
            tensor = torch.ones(1000)
            tensors.append((tensor, 4.0 if group is everyone else 2.0))
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work in reversed(works):
        work.wait()
    assert all(tensor.unique().tolist() == [value] for tensor, value in tensors)


def check_groups_by_enumeration(world):
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    tensor = torch.tensor([float(world.rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == 3.0


def check_group_of_one_rank(world):
    group = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    tensor = torch.tensor([3.0])
    dist.all_reduce(tensor, group=group)
    output = torch.empty(1)
    dist.all_gather_into_tensor(output, tensor, group=group)
    dist.barrier(group)
    assert (tensor.item(), output.item()) == (3.0, 3.0)


def check_group_with_local_synchronization(world):
    # Each rank makes one group: torch 2.15 counts them, and waits forever in later groups if the
    # ranks' numbers differ, also with Gloo.
    ranks = [1, 2] if world.rank in (1, 2) else [0, 3]
    group = dist.new_group(ranks, use_local_synchronization=True)
    tensor = torch.tensor([float(world.rank)])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 3.0


def check_two_dimensional_mesh(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    tensor = torch.tensor([float(world.rank)])
    dist.all_reduce(tensor, group=mesh.get_group("inner"))
    assert tensor.item() == (1.0, 5.0)[world.rank // 2]
    tensor = torch.tensor([float(world.rank)])
    dist.all_reduce(tensor, group=mesh["outer"].get_group())
    assert tensor.item() == (2.0, 4.0)[world.rank % 2]
    assert mesh["outer", "inner"]._flatten("all").size() == world.size


def own_gloo_group_works_beside(world):
    group = dist.new_group(backend="gloo")
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [16.0] * 4


def own_mesh_with_backend_override(world):
    mesh = init_device_mesh(
        "cpu", (4,), mesh_dim_names=("all",), backend_override={"all": "unisono"}
    )
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=mesh.get_group())
    assert tensor.tolist() == [4.0] * 3


def own_split_of_a_group(world):
    part = dist.group.WORLD.split_group([1, 3] if world.rank % 2 else [0, 2])
    tensor = torch.tensor([float(world.rank)])
    part.allreduce([tensor]).wait()
    assert tensor.item() == (2.0, 4.0)[world.rank % 2]
    part.shutdown()


def own_messages_of_types_that_only_move(world):
    tensor = torch.full((8,), 1.5).to(torch.float8_e5m2)
    if world.rank == 0:
        dist.send(tensor, 1)
    elif world.rank == 1:
        incoming = torch.zeros(8).to(torch.float8_e5m2)
        dist.recv(incoming, 0)
        np.testing.assert_array_equal(incoming.float().numpy(), np.full(8, 1.5))


def own_messages_to_self(world):
    works = [dist.isend(message(world.rank, tag), world.rank, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        incoming = torch.empty(17)
        dist.irecv(incoming, world.rank, tag=tag).wait()
        assert torch.equal(incoming, message(world.rank, tag))
    for work in works:
        work.wait()


def own_messages_to_self_in_a_batch(world):
    outgoing, incoming = message(world.rank, world.rank), torch.empty(17)
    operations = [
        dist.P2POp(dist.irecv, incoming, world.rank),
        dist.P2POp(dist.isend, outgoing, world.rank),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(incoming, outgoing)
    dist.isend(outgoing, world.rank, tag=3)
    anything = torch.empty(17)
    assert dist.irecv(anything, tag=3).wait()
    assert torch.equal(anything, outgoing)


def own_wrong_messages_to_self(world):
    groups = [dist.new_group(), dist.new_group()]
    with pytest.raises(MismatchError, match=r"\(3 elements .* receives 8 bytes"):
        # isend is inside the block, since it also raises if another rank has failed before
        dist.isend(torch.ones(3), world.rank, group=groups[0])
        dist.irecv(torch.ones(2), world.rank, group=groups[0]).wait()
    receive = dist.irecv(torch.ones(2), world.rank, group=groups[1])
    with pytest.raises(TimeoutError, match="under way"):
        receive.wait(timedelta(seconds=0.05))
    dist.isend(torch.ones(2), world.rank, group=groups[1])
    assert receive.wait() and receive.is_success()


def own_split_group_replaces_torchs(world):
    part = reserved.split_group(split_ranks=[[3, 1], [0, 2]], group_desc="halves")
    assert dist.get_process_group_ranks(part) == ([0, 2], [1, 3])[world.rank % 2]
    nested = reserved.split_group(part, [[1]])
    assert (nested is None) is (world.rank < 2)
    tensor = torch.tensor([float(world.rank)])
    dist.all_reduce(tensor, group=part)
    assert tensor.item() == (2.0, 4.0)[world.rank % 2]
    dist.destroy_process_group(part)
    with pytest.raises(ValueError, match="distinct"):
        reserved.split_group(split_ranks=[[0, 0]])


def own_monitored_barrier_names_missing_ranks(world):
    group = dist.new_group()
    if world.rank in (0, 2):
        with pytest.raises(CollectiveTimeoutError, match=r"rank.*1(?s:.)*3"):
            reserved.monitored_barrier(group, timedelta(seconds=0.3), wait_all_ranks=True)
    dist.barrier()
    reserved.monitored_barrier()
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(UnsupportedError, match="expected a group of unisono"):
        reserved.monitored_barrier(gloo)


def own_coalesced_point_to_point(world):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    incoming = torch.empty(50_000)
    device = torch.device("cpu")
    with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as manager:
        dist.irecv(incoming, left)
        dist.isend(message(world.rank, right, 50_000), right)
    manager.wait()
    assert torch.equal(incoming, message(left, world.rank, 50_000))
