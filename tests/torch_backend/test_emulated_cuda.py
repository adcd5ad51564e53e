"""CUDA's part of the device path, on an emulation of CUDA's driver by CPU memory."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from torch_backend.emulated_cuda import EmulatedCuda
from unisono.errors import CommunicationError, UnsupportedError
from unisono.torch_backend import communicator_of
from unisono.torch_backend.device.device_group import over_peer_memory
from unisono.torch_backend.device.sharing_trial import require_sharing
from unisono.torch_backend.own_cuda import OwnCuda
from unisono.torch_backend.process_group import ProcessGroup

pytestmark = pytest.mark.torch
device_group_module = sys.modules[over_peer_memory.__module__]
RANKS = 3
BACKENDS = ("unisono",)


def test_emulated_cuda(outcome):
    outcome.require_success()


def new_host():
    return dist.group.WORLD.communicator.group(list(range(RANKS)))


def connected(world, sibling=None):
    host = new_host()
    device = EmulatedCuda(host, world.folder, sibling)
    require_sharing(host, device, lambda: device.tensor(torch.zeros(64, dtype=torch.int64)))
    return device, ProcessGroup(over_peer_memory(host, device))


def options(cls, asynchronous=False, **fields):
    found = cls()
    found.asyncOp = asynchronous
    for name, each in fields.items():
        setattr(found, name, each)
    return found


def all_reduce(device, group, x, asynchronous=False):
    group.allreduce([x], options(dist.AllreduceOptions, asynchronous)).wait()
    device.synchronize(device.mark())
    return x.clone()


def own_collectives(world):
    device, group = connected(world)
    rank = world.rank
    for turn in range(4):
        for length in (1, 5, 1001):
            for later in (False, True):
                whole = device.tensor(torch.arange(2000.0) * (rank + 1))
                x = whole[turn : turn + length]
                expected = torch.arange(2000.0)[turn : turn + length] * 6
                assert torch.equal(all_reduce(device, group, x, later), expected)
    out, x = device.tensor(torch.zeros(6)), device.tensor([rank, 10.0 + rank])
    group.all_gather_single(out, x, None).wait()
    device.synchronize(device.mark())
    assert out.tolist() == [0, 10, 1, 11, 2, 12]
    x = device.tensor(torch.arange(6.0) + 10 * rank)
    group.all_to_all_single(out, x, [], []).wait()
    device.synchronize(device.mark())
    assert out.tolist() == [10.0 * s + 2 * rank + k for s in range(RANKS) for k in range(2)]
    piece = device.tensor(torch.zeros(2))
    group.reduce_scatter_single(piece, x, None).wait()
    device.synchronize(device.mark())
    assert piece.tolist() == [30.0 + 3 * (2 * rank + k) for k in range(2)]
    group.shutdown()


def own_messages(world):
    device, group = connected(world)
    rank = world.rank
    for turn in range(80):  # more than there are flags
        x, y = device.tensor([rank + 10.0 * turn]), device.tensor([0.0])
        works = [group.send([x], (rank + 1) % RANKS), group.recv([y], (rank - 1) % RANKS)]
        for work in works:
            work.wait()
        device.synchronize(device.mark())
        assert y.item() == (rank - 1) % RANKS + 10.0 * turn
    group.shutdown()


def own_messages_that_cannot_be_shared(world):
    """Neither side waits for a message whose memory the other side cannot share."""
    device, group = connected(world)
    ours, other = device.tensor(torch.ones(4)), torch.ones(4)
    for bad in (1, 2):  # the sender, the receiver
        x = other if world.rank == bad else ours
        if world.rank == bad:
            expected = pytest.raises(UnsupportedError, match="cannot find an allocation")
        else:
            expected = pytest.raises(CommunicationError, match=f"rank {bad} cannot (share|read)")
        if world.rank == 1:
            with expected:
                group.send([x], 2).wait()
        if world.rank == 2:
            with expected:
                group.recv([x], 1).wait()
    assert all_reduce(device, group, device.tensor([2.0])).item() == 6
    group.shutdown()


def own_memory_that_is_allocated_again(world):
    """A freed allocation and the next one have one address and one handle, but other values."""
    device, group = connected(world)
    x = device.tensor([1.0 + world.rank])
    assert all_reduce(device, group, x).item() == 6
    for turn in range(3):
        place = device.free(x)
        x = device.tensor([10.0 * turn + world.rank], at=place)
        assert x.data_ptr() == place
        assert all_reduce(device, group, x).item() == 30 * turn + 3
        require_few_open(world, device)
    for turn in range(3):  # of other lengths, so with other handles
        device.free(x)
        x = device.tensor(torch.full((10_000 * (turn + 1),), 1.0))
        assert torch.equal(all_reduce(device, group, x), torch.full_like(x, RANKS))
        require_few_open(world, device)
    group.shutdown()


def own_groups_share_open_memory(world):
    """The second group opens memory whose handle the first one has open for freed memory."""
    device, first = connected(world)
    other, second = connected(world, device)
    x = device.tensor([1.0 + world.rank])
    assert all_reduce(device, first, x).item() == 6
    x = device.tensor([10.0 + world.rank], at=device.free(x))
    assert all_reduce(other, second, x).item() == 33
    assert all_reduce(device, first, x).item() == 99
    opened = device.open_memory
    assert opened is other.open_memory
    second.shutdown()
    assert all_reduce(device, first, x).item() == 297
    first.shutdown()
    assert len(opened) == 0


def require_few_open(world, device):
    """Asserts that at most two allocations of each other rank are open: of the trial and of x."""
    opened = [key for key in device._memory._open if key[0] != world.rank]
    assert len(opened) <= 2 * (RANKS - 1), "freed allocations stay open"


def own_memory_that_cannot_be_shared(world):
    """One rank's refusal is raised on all ranks, and the group stays usable."""
    device, group = connected(world)
    x = torch.ones(4) if world.rank == 1 else device.tensor(torch.ones(4))
    with pytest.raises(UnsupportedError, match="rank 1: cannot find an allocation"):
        all_reduce(device, group, x)
    device.emulated.emulated_shares(world.rank != 2)
    x = device.tensor(torch.ones(4))
    with pytest.raises(UnsupportedError, match=r"rank 2: cannot share .*NOT_SUPPORTED"):
        all_reduce(device, group, x)
    device.emulated.emulated_shares(1)
    assert all_reduce(device, group, device.tensor([2.0])).item() == 6
    group.shutdown()


def own_trial_refuses_on_all_ranks(world):
    host = new_host()
    device = EmulatedCuda(host, world.folder)
    device.emulated.emulated_shares(world.rank != 1)
    with pytest.raises(UnsupportedError, match="cannot be shared: rank 1: cannot share memory"):
        require_sharing(host, device, lambda: device.tensor(torch.zeros(64, dtype=torch.int64)))
    device.emulated.emulated_shares(1)
    device.close()


def pretended_cuda(world, patch, shares):
    """Lets `device_group` find the emulated driver; returns the devices that it makes."""
    made = []

    class Made(EmulatedCuda):
        def __init__(self, host, place, page, sibling):
            super().__init__(host, world.folder, sibling)
            self.emulated.emulated_shares(shares)
            made.append(self)

    found = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0)
    names = {"cuda": found, "device": torch.device, "int64": torch.int64}
    zeros = lambda count, **options: made[-1].tensor(torch.zeros(count, dtype=torch.int64))  # noqa: E731
    patch.setattr(device_group_module, "torch", SimpleNamespace(**names, zeros=zeros))
    patch.setattr(device_group_module, "CudaDevice", Made)
    patch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    patch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
    patch.setitem(sys.modules, "cuda.bindings.nvrtc", ModuleType("cuda.bindings.nvrtc"))
    return made


def own_group_creation(world):
    with pytest.MonkeyPatch.context() as patch:
        made = pretended_cuda(world, patch, True)
        comm = device_group_module.device_group(dist.group.WORLD.communicator)
        assert comm.explain() == "between the device memories of one host, moved by 1 of 3 ranks"
        group = ProcessGroup(comm)
        both = SimpleNamespace(others=OwnCuda(group=group, backends={"cuda": "unisono"}))
        assert communicator_of(both, "cuda") is comm
        assert communicator_of(both, "xpu") is None and communicator_of(None, "cuda") is None
        assert all_reduce(made[0], group, made[0].tensor([1.0])).item() == RANKS
        second = device_group_module.device_group(dist.group.WORLD.communicator, comm)
        assert second.device.open_memory is comm.device.open_memory
        second.close()
        group.shutdown()


def own_group_creation_without_sharing(world):
    """If one rank cannot share its memory, all ranks use host memory, and rank 0 says why."""
    log = []
    with pytest.MonkeyPatch.context() as patch:
        made = pretended_cuda(world, patch, world.rank != 2)
        patch.setattr(device_group_module, "CudaStream", lambda place: made[0])
        patch.setattr(device_group_module._log, "warning", lambda *words: log.append(words))
        comm = device_group_module.device_group(dist.group.WORLD.communicator)
        made[0].emulated.emulated_shares(1)
        reason = "CUDA tensors cannot be shared: rank 2: cannot share memory: CUDA reports"
        assert comm.explain().startswith(f"through host memory, since {reason}")
        assert len(log) == (world.rank == 0)
        group = ProcessGroup(comm)
        assert all_reduce(made[0], group, torch.ones(3)).tolist() == [RANKS] * 3
        group.shutdown()


def own_group_creation_without_a_compiler(world):
    with pytest.MonkeyPatch.context() as patch:
        pretended_cuda(world, patch, True)
        if world.rank == 1:
            patch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
        patch.setattr(device_group_module, "CudaStream", lambda place: None)
        comm = device_group_module.device_group(dist.group.WORLD.communicator)
        assert "cuda-bindings is missing (pip install 'unisono[cuda]'): rank 1" in comm.explain()
        comm.close()


def own_calls_of_the_driver(world):
    """A call whose kind has occurred before needs few calls of the driver."""
    device, group = connected(world)
    x = device.tensor(torch.ones(64))
    all_reduce(device, group, x)
    device.calls()
    for _ in range(10):
        group.allreduce([x], options(dist.AllreduceOptions)).wait()
    assert device.calls() == 10 * (4 if world.rank == 0 else 2)
    device.synchronize(device.mark())
    group.shutdown()


def own_other_threads(world):
    """A thread that has not used CUDA gets the context of the first one."""
    device, group = connected(world)
    x = device.tensor(torch.full((8,), 1.0 + world.rank))
    found = []
    thread = threading.Thread(target=lambda: found.append(all_reduce(device, group, x)))
    thread.start()
    thread.join()
    assert found[0].tolist() == [6.0] * 8
    group.shutdown()
