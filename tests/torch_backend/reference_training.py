"""A small model, its batches, and the result of its training in one process, for comparisons."""

from __future__ import annotations

import torch
from torch import nn

STEPS = 3
LOCAL_BATCH = 8


def model_of(seed=0, width=32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )


def batches(world_size):
    """Returns the global batch (inputs, targets) of every step."""
    generator = torch.Generator().manual_seed(7)
    rows = LOCAL_BATCH * world_size
    return [
        (torch.randn(rows, 6, generator=generator), torch.randn(rows, 2, generator=generator))
        for _ in range(STEPS)
    ]


def share(world, tensor):
    return tensor.chunk(world.size)[world.rank]


def train(model, optimizer, data):
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def reference(world):
    """Returns the parameters after training on the global batches in this process alone."""
    model = model_of()
    return dict(train(model, sgd(model), batches(world.size)).named_parameters())


def local_batches(world):
    return [(share(world, x), share(world, y)) for x, y in batches(world.size)]


def require_reference(world, parameters, tolerance=1e-5):
    expected = reference(world)
    actual = {name.removeprefix("module."): value for name, value in parameters}
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance)
