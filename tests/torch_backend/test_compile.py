"""torch.compile of programs that use our collectives: functional, in place, DDP and fully_shard."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.torch
RANKS = 2
BACKEND = "aot_eager"


def test_compile(outcome):
    outcome.require_success()


def check_compiled_functional_collectives(world):
    @torch.compile(backend=BACKEND, fullgraph=True)
    def program(x):
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        gathered = functional.all_gather_tensor(total, 0, dist.group.WORLD)
        return functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD) + 1

    result = program(torch.full((4,), 1.0 + world.rank))
    torch.testing.assert_close(result, torch.full((4,), 2 * 3.0 * 2 + 1))


def check_compiled_in_place_collectives(world):
    @torch.compile(backend=BACKEND, fullgraph=True)
    def program(x):
        y = x * 2
        dist.all_reduce(y)
        out = torch.empty(8)
        dist.all_gather_into_tensor(out, y)
        return out

    result = program(torch.full((4,), 1.0 + world.rank))
    torch.testing.assert_close(result, torch.full((8,), 6.0))


def check_compiled_scattering_collectives(world):
    @torch.compile(backend=BACKEND, fullgraph=True)
    def program(x):
        scattered = torch.empty(2)
        dist.reduce_scatter_tensor(scattered, x)
        exchanged = torch.empty(4)
        dist.all_to_all_single(exchanged, x)
        pieces = [torch.empty(4) for _ in range(2)]
        dist.all_gather(pieces, x)
        return scattered, exchanged, pieces[0] + pieces[1]

    scattered, exchanged, total = program(torch.arange(4.0) + world.rank)
    everyone = [torch.arange(4.0), torch.arange(4.0) + 1]
    assert torch.equal(total, sum(everyone))
    assert torch.equal(scattered, sum(everyone).chunk(2)[world.rank])
    assert torch.equal(exchanged, torch.cat([x.chunk(2)[world.rank] for x in everyone]))


def check_compiled_async_collective(world):
    @torch.compile(backend=BACKEND)
    def program(x):
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        return x + 1

    assert program(torch.ones(3)).tolist() == [3.0] * 3


def check_compiled_ddp(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    wrapped = torch.compile(DistributedDataParallel(model), backend=BACKEND)
    inputs = torch.arange(4.0 * world.size).reshape(world.size, 4)
    wrapped(inputs[world.rank : world.rank + 1]).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    (model(inputs).sum() / world.size).backward()
    for actual, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(actual, parameter.grad)


def check_compiled_fully_shard(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    alone = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    alone.load_state_dict(model.state_dict())
    inputs = torch.arange(4.0 * world.size).reshape(world.size, 4)
    (alone(inputs).sum() / world.size).backward()
    sharded = fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    torch.compile(sharded, backend=BACKEND)(inputs[world.rank : world.rank + 1]).sum().backward()
    for actual, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), expected.grad)
