"""torch's parallel strategies: each compared with the same training in one process."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as dist_nn
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from torch_backend.reference_training import (
    batches,
    local_batches,
    model_of,
    require_reference,
    sgd,
    train,
)
from worlds.torch_version import needs_torch
from worlds.world_rank import STAND_IN

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono", "gloo", STAND_IN)


def test_parallel(outcome):
    outcome.require_success()


def average_gradients(model):
    """Averages gradients by one all_reduce and a division for each parameter."""
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)
        parameter.grad.data /= size


def check_average_gradients_by_hand(world):
    model = model_of()
    optimizer = sgd(model)
    for inputs, targets in local_batches(world):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        average_gradients(model)
        optimizer.step()
    require_reference(world, model.named_parameters())


def check_ddp(world):
    model = DistributedDataParallel(model_of(seed=world.rank), bucket_cap_mb=0.001)
    model.module.load_state_dict(model_of().state_dict())
    train(model, sgd(model), local_batches(world))
    require_reference(world, model.named_parameters())


def check_ddp_sends_parameters_of_rank_0(world):
    model = DistributedDataParallel(model_of(seed=world.rank))
    for actual, expected in zip(model.parameters(), model_of(seed=0).parameters(), strict=True):
        assert torch.equal(actual, expected)


def check_ddp_with_buffers_and_unused_parameters(world):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.used = nn.Linear(6, 2)
            self.unused = nn.Linear(6, 2)

        def forward(self, x):
            return self.used(self.norm(x))

    torch.manual_seed(0)
    model = DistributedDataParallel(Partly(), find_unused_parameters=True)
    train(model, sgd(model), local_batches(world))
    means = [torch.empty(6) for _ in range(world.size)]
    weights = [torch.empty(2, 6) for _ in range(world.size)]
    model(torch.zeros(3, 6))
    dist.all_gather(weights, model.module.used.weight.detach())
    dist.all_gather(means, model.module.norm.running_mean)
    assert torch.equal(weights[0], weights[1])


def check_ddp_communication_hooks(world):
    for hook, state, tolerance in (
        (default_hooks.allreduce_hook, None, 1e-5),
        (default_hooks.fp16_compress_hook, None, 1e-2),
    ):
        model = DistributedDataParallel(model_of(), bucket_cap_mb=0.001)
        model.register_comm_hook(state, hook)
        train(model, sgd(model), local_batches(world))
        require_reference(world, model.named_parameters(), tolerance)


def check_ddp_power_sgd(world):
    # Uses one bucket, since PowerSGD starts collectives in callbacks of other collectives. Here, as
    # with gloo, a callback runs when its collective ends. With several buckets, the order of these
    # collectives would then be undefined. NCCL runs a callback when it is requested.
    model = DistributedDataParallel(model_of())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    data = local_batches(world)
    before = nn.functional.mse_loss(model(data[0][0]), data[0][1]).item()
    train(model, sgd(model), data * 6)
    assert nn.functional.mse_loss(model(data[0][0]), data[0][1]).item() < before
    weights = [torch.empty_like(model.module[0].weight) for _ in range(world.size)]
    dist.all_gather(weights, model.module[0].weight.detach())
    assert torch.equal(weights[0], weights[1])


def check_ddp_uneven_inputs_with_join(world):
    model = DistributedDataParallel(model_of())
    optimizer = sgd(model)
    data = local_batches(world)[: 1 + world.rank]
    with Join([model]):
        train(model, optimizer, data)
    weights = [torch.empty_like(model.module[0].weight) for _ in range(world.size)]
    dist.all_gather(weights, model.module[0].weight.detach())
    assert torch.equal(weights[0], weights[1])


def check_ddp_sparse_embedding(world):
    torch.manual_seed(0)
    embedding = nn.EmbeddingBag(20, 4, sparse=True)
    alone = copy.deepcopy(embedding)
    model = DistributedDataParallel(embedding)
    rows = torch.tensor([[1, 2], [3, 1 + world.rank]])
    model(rows).sum().backward()
    every_row = torch.cat([torch.tensor([[1, 2], [3, 1 + rank]]) for rank in range(world.size)])
    (alone(every_row).sum() / world.size).backward()
    torch.testing.assert_close(model.module.weight.grad.to_dense(), alone.weight.grad.to_dense())


def check_zero_redundancy_optimizer(world):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # the import warns

    model = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train(model, optimizer, local_batches(world))
    require_reference(world, model.named_parameters())
    optimizer.consolidate_state_dict(to=0)


def check_fsdp1(world):
    model = FullyShardedDataParallel(model_of(), device_id=torch.device("cpu"))
    train(model, sgd(model), local_batches(world))
    with FullyShardedDataParallel.summon_full_params(model):
        parameters = [(name, value.clone()) for name, value in model.module.named_parameters()]
    require_reference(world, parameters)


def sharded_model(mesh=None, **options):
    model = model_of()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def check_fully_shard(world):
    mesh = init_device_mesh("cpu", (world.size,))
    model = sharded_model(mesh)
    train(model, sgd(model), local_batches(world))
    require_reference(
        world, [(name, value.full_tensor()) for name, value in model.named_parameters()]
    )


def check_fully_shard_with_replicas(world):
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded_model(mesh)
    train(model, sgd(model), local_batches(world))
    require_reference(
        world, [(name, value.full_tensor()) for name, value in model.named_parameters()]
    )


def own_fully_shard_with_divide_factor(world):
    model = sharded_model(init_device_mesh("cpu", (world.size,)))
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(2.0 * world.size)
    # twice the learning rate, since the gradient is halved
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    train(model, optimizer, local_batches(world))
    require_reference(
        world, [(name, value.full_tensor()) for name, value in model.named_parameters()]
    )


def check_dtensor_redistribute(world):
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(40.0).reshape(5, 8)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    partial = DTensor.from_local(whole, mesh, [Partial()])
    assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), whole * world.size)
    scattered = partial.redistribute(mesh, [Shard(1)]).to_local()
    assert torch.equal(scattered, (whole * world.size).chunk(world.size, 1)[world.rank])


def check_dtensor_matmul(world):
    mesh = init_device_mesh("cpu", (world.size,))
    torch.manual_seed(1)
    left, right = torch.randn(6, 8), torch.randn(8, 4)
    product = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), left @ right)


def check_tensor_parallel(world):
    mesh = init_device_mesh("cpu", (world.size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(model_of(), mesh, plan)
    data = batches(world.size)
    train(model, sgd(model), data)
    parameters = [
        (name, value.full_tensor() if isinstance(value, DTensor) else value)
        for name, value in model.named_parameters()
    ]
    require_reference(world, parameters)


def check_pipelining(world):
    needs_torch("2.13", "its stages send an integer to a receiver of a float, also over Gloo")
    whole = model_of()
    stages = [whole[:2], whole[2:]]
    inputs, targets = batches(world.size)[0]
    expected = nn.functional.mse_loss(copy.deepcopy(whole)(inputs), targets)
    for schedule_type in (ScheduleGPipe, Schedule1F1B):
        module = copy.deepcopy(stages[world.rank])
        stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"))
        schedule = schedule_type(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        if world.rank == 0:
            schedule.step(inputs)
        else:
            losses = []
            schedule.step(target=targets, losses=losses)
            torch.testing.assert_close(torch.stack(losses).mean(), expected)
        alone = copy.deepcopy(whole)
        nn.functional.mse_loss(alone(inputs), targets).backward()
        expected_gradients = [p.grad for p in alone[:2].parameters()]
        if world.rank == 0:
            for parameter, gradient in zip(module.parameters(), expected_gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)


def check_checkpoint(world):
    mesh = init_device_mesh("cpu", (world.size,))
    model = sharded_model(mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, local_batches(world))
    trained = {name: value.full_tensor().clone() for name, value in model.named_parameters()}
    model_state, optimizer_state = get_state_dict(model, optimizer)
    folder = world.folder / f"checkpoint-{world.backend}"
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state, checkpoint_id=folder)

    train(model, optimizer, local_batches(world))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for name, value in model.named_parameters():
        assert torch.equal(value.full_tensor(), trained[name])


def own_checkpoint_async(world):
    # async_save needs a CPU backend. It accepts a gloo group, and must also accept our group.
    model = sharded_model(init_device_mesh("cpu", (world.size,)))
    folder = world.folder / "checkpoint-async"
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.async_save(state, checkpoint_id=folder).result()
    loaded = {"model": sharded_model(init_device_mesh("cpu", (world.size,))).state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    for name, value in state["model"].items():
        assert torch.equal(loaded["model"][name].full_tensor(), value.full_tensor())


def check_functional_collectives(world):
    group = dist.group.WORLD
    mine = torch.arange(6.0) + world.rank
    everyone = [torch.arange(6.0) + rank for rank in range(world.size)]
    total = sum(everyone)
    assert torch.equal(functional.all_reduce(mine, "sum", group) + 0, total)
    gathered = functional.all_gather_tensor(mine, 0, group)
    assert torch.equal(gathered + 0, torch.cat(everyone))
    scattered = functional.reduce_scatter_tensor(mine, "sum", 0, group)
    assert torch.equal(scattered + 0, total.chunk(world.size)[world.rank])
    sent = functional.all_to_all_single(mine, [3, 3], [3, 3], group)
    assert torch.equal(sent + 0, torch.cat([e.chunk(2)[world.rank] for e in everyone]))
    assert torch.equal(functional.broadcast(mine, 1, group) + 0, everyone[1])
    first, second = functional.all_reduce_coalesced([mine, 2 * mine], "sum", group)
    assert torch.equal(first + 0, total)
    assert torch.equal(second + 0, 2 * total)
    first, second = functional.all_gather_into_tensor_coalesced([mine, 2 * mine], group)
    assert torch.equal(second + 0, 2 * torch.cat(everyone))
    (only,) = functional.reduce_scatter_tensor_coalesced([mine], "sum", [0], group)
    assert torch.equal(only + 0, total.chunk(world.size)[world.rank])


def check_functional_point_to_point(world):
    needs_torch("2.13", "it has no functional messages")
    other, group = 1 - world.rank, dist.group.WORLD
    mine, expected = torch.full((3,), 1.0 + world.rank), torch.full((3,), 1.0 + other)
    assert torch.equal(functional.permute_tensor(mine, [1, 0], group) + 0, expected)
    incoming = torch.zeros(3)
    operations = (["irecv", "isend"], [other, other], [0, 0], [incoming, mine])
    for tensor in functional.batch_p2p_ops_inplace(*operations, group):
        functional.wait_tensor(tensor)
    assert torch.equal(incoming, expected)


def check_functional_collectives_with_gradients(world):
    mine = (torch.arange(6.0) + world.rank).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(mine, 0, dist.group.WORLD)
    (gathered * gathered).sum().backward()
    torch.testing.assert_close(mine.grad, 2 * world.size * mine.detach())
    mine.grad = None
    scattered = functional.reduce_scatter_tensor_autograd(mine, "sum", 0, dist.group.WORLD)
    (scattered * (1 + world.rank)).sum().backward()
    torch.testing.assert_close(mine.grad, torch.tensor([1.0] * 3 + [2.0] * 3))
    mine.grad = None
    sent = functional.all_to_all_single_autograd(mine, [3, 3], [3, 3], dist.group.WORLD)
    (sent * (1 + world.rank)).sum().backward()
    torch.testing.assert_close(mine.grad, torch.tensor([1.0] * 3 + [2.0] * 3))


def check_collectives_of_distributed_nn(world):
    mine = torch.full((4,), 1.0 + world.rank, requires_grad=True)
    (dist_nn.all_reduce(mine) * (1 + world.rank)).sum().backward()
    torch.testing.assert_close(mine.grad, torch.full((4,), 3.0))


# This check is for unisono only, since with gloo the next call may raise the error of a refused
# call.
def own_errors_of_the_caller_leave_the_group_usable(world):
    output = torch.empty(3)
    try:
        dist.all_to_all_single(output, torch.ones(4), [1, 1], [2, 2])
    except (ValueError, RuntimeError):
        pass
    else:
        raise AssertionError("wrong split sizes were accepted")
    dist.barrier()
