"""A small regression task for tests of compressed gradients: model, data, loss and training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from ranks import Threads  # noqa: E402
from unisono import Communicator  # noqa: E402
from unisono.parallel import Bf16, Fp16, Int8, PowerSGD, TopK  # noqa: E402

World = Callable[[int], Threads]
ROWS = 8
ALL = [
    Fp16(),
    Bf16(),
    PowerSGD(rank=2, min_compression=1.1),
    Int8(values_per_scale=32),
    TopK(fraction=0.2),
]
WITH_STATE = ALL[2:]


def name_of(compression: Any) -> str:
    return type(compression).__name__


each = pytest.mark.parametrize("compression", ALL, ids=name_of)
each_with_state = pytest.mark.parametrize("compression", WITH_STATE, ids=name_of)


class Branches(nn.Module):
    """Two matrices and a bias; `forward` may leave one matrix out."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(12, 16, bias=False)
        self.right = nn.Linear(12, 16, bias=False)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Any, branch: str = "both") -> Any:
        hidden = torch.zeros(len(x), 16, dtype=x.dtype)
        if branch in ("both", "left"):
            hidden = hidden + torch.tanh(self.left(x))
        if branch in ("both", "right"):
            hidden = hidden + torch.tanh(self.right(x))
        return self.last(hidden)


torch.manual_seed(7)
TEMPLATE = Branches()
TEACHER = copy.deepcopy(TEMPLATE)  # the function to be learned
for _parameter in TEACHER.parameters():
    _parameter.data += 0.3 * torch.randn_like(_parameter)


def make_model() -> Branches:
    return copy.deepcopy(TEMPLATE)


def make_batch(step: int, rank: int) -> Any:
    return torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: Any, comm: Communicator, step: int, branch: str = "both") -> Any:
    x = make_batch(step, comm.rank)
    with torch.no_grad():
        target = TEACHER(x)
    return (model(x, branch) - target).square().mean()


def bits_of(model: Any) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def train(model: Any, optimizer: Any, comm: Communicator, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, comm, step).backward()
        optimizer.step()


def make_sgd(model: Any, lr: float = 0.1) -> Any:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)
