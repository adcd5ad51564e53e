"""Collectives on a device's memory, compared with NumPy. The device is the CPU memory of other
processes, with streams that run late."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import distributed as dist

from torch_backend.process_memory import ProcessMemory
from unisono.errors import MismatchError
from unisono.torch_backend.device import DeviceCommunicator
from unisono.torch_backend.device.device_group import over_peer_memory
from unisono.torch_backend.device.host_memory import HostMemory
from unisono.torch_backend.device.peer_device import SideStream
from unisono.torch_backend.device.sharing_trial import require_sharing
from unisono.torch_backend.process_group import ProcessGroup

pytestmark = pytest.mark.torch
RANKS = 3
BACKENDS = ("unisono",)
LENGTHS = (0, 1, 5, 1000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)


def test_device(outcome):
    outcome.require_success()


def groups(world):
    """Yields process groups over the device: one rank performs all moves, or each its own; and one
    over host memory."""
    for performers in ([0] * RANKS, list(range(RANKS)), [1, 1, 2]):
        host = world_communicator().group(list(range(RANKS)))
        device = ProcessMemory(host, performers)
        require_sharing(host, device, lambda: torch.zeros(64, dtype=torch.int64))
        yield device, ProcessGroup(over_peer_memory(host, device))
    host = world_communicator().group(list(range(RANKS)))
    device = ProcessMemory(host, delay_s=0.0005)
    path = HostMemory(host, device, block_bytes=3000)
    yield device, ProcessGroup(DeviceCommunicator(host, device, path, path, "a test"))


def world_communicator():
    return dist.group.WORLD.communicator


def late(device, values):
    """Returns a tensor that gets its values late, by the current stream."""
    values = torch.as_tensor(values)
    x = torch.full_like(values, 77)
    device.enqueue(lambda: x.copy_(values))
    return x


def read(device, x):
    """Returns the values that the current stream's work gives a tensor."""
    device.synchronize(device.mark())
    return x.clone()


def value(rank, length, dtype, salt=0):
    x = torch.arange(length) * (rank + 2) + rank + salt
    return (x % 7 + 1).to(dtype)


def options(cls, asynchronous, **fields):
    found = cls()
    found.asyncOp = asynchronous
    for name, each in fields.items():
        setattr(found, name, each)
    return found


def own_all_reduce(world):
    for device, group in groups(world):
        for dtype in DTYPES:
            for length in LENGTHS:
                for later in (False, True):
                    x = late(device, value(world.rank, length, dtype))
                    group.allreduce([x], options(dist.AllreduceOptions, later)).wait()
                    expected = sum(value(r, length, torch.float64) for r in range(RANKS))
                    assert torch.equal(read(device, x), expected.to(dtype))
        group.shutdown()


def own_many_calls_at_once(world):
    for device, group in groups(world):
        xs = [late(device, value(world.rank, 40 + k, torch.float32, k)) for k in range(12)]
        works = [group.allreduce([x], options(dist.AllreduceOptions, True)) for x in xs]
        for k in reversed(range(12)):
            works[k].wait()
            expected = sum(value(r, 40 + k, torch.float32, k) for r in range(RANKS))
            assert torch.equal(read(device, xs[k]), expected)
        group.shutdown()


def own_gathering_and_scattering(world):
    rank = world.rank
    for device, group in groups(world):
        for length in LENGTHS:
            mine = late(device, value(rank, length, torch.float32))
            every = [value(r, length, torch.float32) for r in range(RANKS)]
            out = torch.zeros(RANKS * length)
            group.all_gather_single(out, mine, None).wait()
            assert torch.equal(read(device, out), torch.cat(every))
            outs = [torch.zeros(length) for _ in range(RANKS)]
            group.allgather([outs], [mine], None).wait()
            read(device, out)
            assert all(map(torch.equal, outs, every))
            piece = torch.zeros(length)
            whole = late(
                device, torch.cat([value(rank + r, length, torch.float32) for r in range(RANKS)])
            )
            group.reduce_scatter_single(piece, whole, None).wait()
            assert torch.equal(
                read(device, piece),
                sum(value(r + rank, length, torch.float32) for r in range(RANKS)),
            )
            group.scatter(
                [piece],
                [list(every)] if rank == 1 else [],
                options(dist.ScatterOptions, False, rootRank=1),
            ).wait()
            assert torch.equal(read(device, piece), every[rank])
            found = [torch.zeros(length) for _ in range(RANKS)] if rank == 2 else []
            group.gather(
                [found] if rank == 2 else [], [mine], options(dist.GatherOptions, False, rootRank=2)
            ).wait()
            read(device, mine)
            assert all(map(torch.equal, found, every if rank == 2 else []))
            both = late(device, every[rank])
            group.broadcast([both], options(dist.BroadcastOptions, True, rootRank=1)).wait()
            assert torch.equal(read(device, both), every[1])
            most = late(device, every[rank])
            group.reduce(
                [most], options(dist.ReduceOptions, True, rootRank=2, reduceOp=dist.ReduceOp.MAX)
            ).wait()
            if rank == 2:
                assert torch.equal(read(device, most), torch.stack(every).max(0).values)
        group.shutdown()


def own_all_to_all(world):
    rank = world.rank
    for device, group in groups(world):
        x = late(device, torch.arange(6.0) + 10 * rank)
        out = torch.zeros(6)
        group.all_to_all_single(out, x, [], []).wait()
        expected = [10 * s + 2 * rank + k for s in range(RANKS) for k in range(2)]
        assert read(device, out).tolist() == expected
        device.synchronize(device.mark())
        sizes = [rank + d for d in range(RANKS)]
        x = torch.arange(float(sum(sizes))) + 100 * rank
        received = [s + rank for s in range(RANKS)]
        out = torch.zeros(sum(received))
        group.all_to_all_single(out, x, received, sizes).wait()
        expected = []
        for s in range(RANKS):
            first = sum(s + d for d in range(rank))
            expected += [100 * s + first + k for k in range(s + rank)]
        assert read(device, out).tolist() == expected
        group.all_to_all_single(out[:3], out[:3], [], []).wait()  # in place
        read(device, out)
        group.shutdown()


def own_uneven_pieces(world):
    """Pieces of different lengths, some empty, and a root's own piece in its place."""
    rank = world.rank
    for device, group in groups(world):
        _check_uneven(device, group, rank, [5, 0, 300], torch.float32)
        _check_uneven(device, group, rank, [2, 2001, 7], torch.bfloat16)
        _check_uneven(device, group, rank, [0, 0, 0], torch.uint8)
        group.shutdown()


def _check_uneven(device, group, rank, sizes, dtype):
    every = [value(r, size, dtype) for r, size in enumerate(sizes)]
    outs = [torch.zeros(size, dtype=dtype) for size in sizes]
    group.allgather([outs], [late(device, every[rank])], None).wait()
    read(device, outs[0])
    assert all(map(torch.equal, outs, every))

    out = torch.zeros(sizes[rank], dtype=dtype)
    pieces = [each.clone() for each in every] if rank == 2 else []
    group.scatter([out], [pieces] if pieces else [], root_options(dist.ScatterOptions, 2)).wait()
    assert torch.equal(read(device, out), every[rank])
    if rank == 2:
        out = pieces[2]  # the root's own piece, in its place
    group.scatter([out], [pieces] if pieces else [], root_options(dist.ScatterOptions, 2)).wait()
    assert torch.equal(read(device, out), every[rank])

    whole = torch.zeros(sum(sizes), dtype=dtype)
    found = list(whole.split(sizes)) if rank == 1 else []
    mine = late(device, every[rank])
    group.gather([found] if found else [], [mine], root_options(dist.GatherOptions, 1)).wait()
    read(device, mine)
    assert all(map(torch.equal, found, every if found else []))
    if rank == 1:
        mine = found[1].copy_(every[1])  # the root's own piece, in its place
    group.gather([found] if found else [], [mine], root_options(dist.GatherOptions, 1)).wait()
    read(device, mine)
    assert all(map(torch.equal, found, every if found else []))

    out = torch.zeros(sizes[rank], dtype=dtype)
    group.reduce_scatter([out], [[each.clone() for each in every]], None).wait()
    total = sum(every[rank].to(torch.float64) for _ in range(RANKS))
    assert torch.equal(read(device, out), total.to(dtype))


def root_options(cls, root):
    return options(cls, False, rootRank=root)


def own_uneven_shares(world):
    """An all_to_all whose shares depend on both ranks, also from a tensor to itself."""
    rank = world.rank
    for device, group in groups(world):
        sizes = [[(s * d) * 40 % 97 for d in range(RANKS)] for s in range(RANKS)]
        given = [torch.arange(sum(sizes[s])) + 1000 * s for s in range(RANKS)]
        received = [sizes[s][rank] for s in range(RANKS)]
        expected = torch.cat([given[s].split(sizes[s])[rank] for s in range(RANKS)])
        out = torch.zeros(sum(received), dtype=torch.int64)
        group.all_to_all_single(out, given[rank].clone(), received, sizes[rank]).wait()
        assert torch.equal(read(device, out), expected)
        both = given[rank].clone()  # the table is symmetric, so the lengths are equal
        group.all_to_all_single(both, both, received, sizes[rank]).wait()
        assert torch.equal(read(device, both), expected)
        group.shutdown()


def own_gathering_in_place(world):
    rank = world.rank
    for device, group in groups(world):
        out = torch.zeros(RANKS * 500)
        mine = out.view(RANKS, 500)[rank]
        device.enqueue(lambda mine=mine: mine.copy_(value(rank, 500, torch.float32)))
        group.all_gather_single(out, mine, None).wait()
        every = [value(r, 500, torch.float32) for r in range(RANKS)]
        assert torch.equal(read(device, out), torch.cat(every))
        piece = out.view(RANKS, 500)[rank]
        group.reduce_scatter_single(piece, out, None).wait()
        assert torch.equal(read(device, piece), RANKS * every[rank])
        group.shutdown()


def own_slow_copies_over_host_memory(world):
    """Many blocks, whose copies in one direction are much later than those in the other."""
    for slow, fast in ((SideStream.UP, SideStream.DOWN), (SideStream.DOWN, SideStream.UP)):
        host = world_communicator().group(list(range(RANKS)))
        device = ProcessMemory(host, delay_s=0)
        device.delay(slow, 0.01)
        device.delay(fast, 0)
        path = HostMemory(host, device, block_bytes=480)
        group = ProcessGroup(DeviceCommunicator(host, device, path, path, "a test"))
        for _ in range(2):
            x = late(device, value(world.rank, 1000, torch.float32))
            group.allreduce([x], options(dist.AllreduceOptions, False)).wait()
            total = sum(value(r, 1000, torch.float32) for r in range(RANKS))
            assert torch.equal(read(device, x), total)
            whole = torch.zeros(RANKS * 400)
            mine = late(device, value(world.rank, 400, torch.float32))
            group.all_gather_single(whole, mine, None).wait()
            every = [value(r, 400, torch.float32) for r in range(RANKS)]
            assert torch.equal(read(device, whole), torch.cat(every))
        group.shutdown()


def own_wrong_arguments_reach_all_ranks(world):
    """One rank refuses its call; the other ranks do not wait for it."""
    for _, group in groups(world):
        length = 7 if world.rank == 1 else 6  # 7 elements have no three equal shares
        error = ValueError if world.rank == 1 else MismatchError
        with pytest.raises(error, match="expected a multiple of 3"):
            group.reduce_scatter_single(torch.zeros(2), torch.zeros(length), None).wait()
        dist.barrier()  # else an abort could be the first news
        group.abort()


def own_explanations(world):
    for device, group in groups(world):
        reason = group.communicator.explain()
        performers = len(set(device.performers))
        assert "a test" in reason or f"moved by {performers} of {RANKS} ranks" in reason
        group.shutdown()


def own_strided_tensors(world):
    for device, group in groups(world):
        x = torch.zeros(4, 6)[:, ::2]
        x += world.rank
        group.allreduce([x], options(dist.AllreduceOptions, False)).wait()
        assert torch.equal(read(device, x), torch.full((4, 3), 3.0))
        group.shutdown()


def own_messages(world):
    rank = world.rank
    right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
    for device, group in groups(world):
        for length in LENGTHS:
            xs = [late(device, value(rank, length, torch.float32, tag)) for tag in range(3)]
            ys = [torch.zeros(length) for _ in range(3)]
            works = [group.send([xs[tag]], right, tag) for tag in range(3)]
            works += [group.recv([ys[tag]], left, tag) for tag in (2, 0, 1)]
            for work in works:
                work.wait()
            for tag, y in enumerate(ys):
                assert torch.equal(read(device, y), value(left, length, torch.float32, tag))
            if rank == 0:
                group.send([late(device, [1.0, 2.0])], 1, 9).wait()
            if rank == 1:
                y = torch.zeros(2)
                work = group.recv_anysource([y], 9)
                work.wait()
                assert work._source_rank() == 0
                assert read(device, y).tolist() == [1.0, 2.0]
        group.shutdown()


def own_mismatches(world):
    for _, group in groups(world):
        length = 4 + (world.rank == 1)
        with pytest.raises(MismatchError):
            group.allreduce([torch.zeros(length)], options(dist.AllreduceOptions, False)).wait()
        group.abort()


def own_lists_join_without_a_copy(world):
    from unisono.torch_backend.device.flat_tensors import flat_target

    whole = torch.zeros(12)
    parts = list(whole.split(4))
    assert flat_target(parts).tensor.data_ptr() == whole.data_ptr()
    assert flat_target(parts[::-1]).finish is not None
    assert np.prod(flat_target(parts).tensor.shape) == 12
