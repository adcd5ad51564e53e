"""ZeRO-1 on three ranks, compared with one process that sums the ranks' gradients in rank order."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel import CounterRandom, ShardedOptimizer
from unisono.torch_backend import Options

pytestmark = pytest.mark.torch
RANKS = 3
WIDTHS = (7, 9, 2, 1)  # 95 parameters, which is not a multiple of 3
STEPS = 3


def test_sharded_optimizer(outcome):
    outcome.require_success()


def model_of(dtype):
    """Returns a network that has the same weights on all ranks."""
    layers = []
    for width, following in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(width, following, dtype=dtype), nn.Tanh()]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(CounterRandom(1).normal(name, parameter.shape))
    return model


def batch(rank, step, dtype):
    return CounterRandom(2).normal(f"data of {rank}", (5, WIDTHS[0]), step=step).to(dtype)


def loss_of(model, rank, step, dtype):
    return model(batch(rank, step, dtype)).square().sum() / (5 * RANKS)


def alone(make, dtype):
    """Returns the model after training in one process."""
    model = model_of(dtype)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            loss_of(model, rank, step, dtype).backward()
        optimizer.step()
    return model


def sharded(world, make, dtype, group=None, drops=False):
    model = model_of(dtype)
    optimizer = ShardedOptimizer(model.parameters(), make, group=group)
    for step in range(STEPS):
        loss_of(model, world.rank, step, dtype).backward()
        optimizer.step()
        if drops:
            model.zero_grad(set_to_none=True)
        else:
            optimizer.zero_grad()
    return model, optimizer


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.1),
}


def check_equal_to_one_process(world):
    for make in OPTIMIZERS.values():
        expected = alone(make, torch.float64)
        for drops in (False, True):
            model, _ = sharded(world, make, torch.float64, drops=drops)
            for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def own_the_bits_of_a_sum_in_rank_order(world):
    """Compares with gradients accumulated in one process, which are added in rank order, as in our
    reduction.
    """
    make = OPTIMIZERS["sgd"]
    expected = alone(make, torch.float32)
    group = dist.new_group(pg_options=Options(reproducible=True))
    model, _ = sharded(world, make, torch.float32, group=group)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def own_bytes_of_a_step(world):
    group = dist.new_group()
    before = group.communicator.stats().operations  # a torch for CUDA has asked for GPUs
    sharded(world, OPTIMIZERS["adamw"], torch.float32, group=group)
    padded = 96  # 95 parameters
    found = group.communicator.stats().operations
    for name in ("reduce_scatter", "all_gather"):
        sent = found[name].bytes_sent - (before[name].bytes_sent if name in before else 0)
        assert sent == STEPS * 4 * padded * (RANKS - 1) // RANKS
    calls = [sum(each.calls for each in operations.values()) for operations in (before, found)]
    assert calls[1] - calls[0] == 2 * STEPS


def own_states_are_divided(world):
    _, optimizer = sharded(world, OPTIMIZERS["adamw"], torch.float32)
    (states,) = optimizer.inner.state.values()
    assert states["exp_avg"].numel() == states["exp_avg_sq"].numel() == 32


def own_wrong_parameters_are_refused(world):
    make = OPTIMIZERS["sgd"]
    with pytest.raises(ValueError, match="at least one that requires a gradient"):
        ShardedOptimizer([], make)
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    with pytest.raises(ValueError, match=r"got torch.float32 on cpu, torch.float64 on cpu"):
        ShardedOptimizer(mixed, make)


def own_shared_parameters_count_once(world):
    weight = nn.Parameter(torch.ones(4))
    optimizer = ShardedOptimizer([weight, weight], lambda params: torch.optim.SGD(params, 1.0))
    (weight.sum() / RANKS).backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.zeros(4), rtol=0, atol=1e-6)
