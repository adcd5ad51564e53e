"""Models, optimizers and gradients for tests of the parameter server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from unisono.parallel import ParameterServer  # noqa: E402

RANGE_BYTES = 256


class Mixed(nn.Module):
    """Parameters of four types and of odd sizes, and a buffer. One parameter is used under two
    names, and one is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape, dtype in (
            ("narrow", (31,), torch.bfloat16),
            ("one", (1,), torch.float32),
            ("wide", (7, 9), torch.float64),
            ("plain", (23, 5), torch.float32),
            ("empty", (0,), torch.float32),
            ("sixteen", (13,), torch.float16),
        ):
            values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            setattr(self, name, nn.Parameter(values))
        self.shared = self.plain
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))


def set_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Sets gradients of very different exponents, so that a sum's bits depend on its order."""
    rng = np.random.default_rng([rank, step])
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = np.ldexp(
                rng.normal(size=parameter.shape), rng.integers(-8, 8, parameter.shape)
            )
            parameter.grad = torch.from_numpy(np.asarray(values)).to(parameter.dtype)


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01)


def train_steps(ps: ParameterServer, model: nn.Module, rank: int, steps: int) -> None:
    if not ps.is_worker:
        ps.serve()
        return
    for step in range(steps):
        set_gradients(model, rank, step)
        ps.step()


def bits_of(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


class Identity(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose step replaces each parameter by its gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)


def identity(params: Any) -> Any:
    return Identity(params)
