"""Blocks with buffers: constant, not saved, or changed by forward passes."""

from __future__ import annotations

import torch
from torch import nn

from random_models.block import Block, block


class Constant(nn.Module):
    """Adds a buffer that does not change."""

    def __init__(self, width: int, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("offset", torch.linspace(-1, 1, width), persistent=persistent)

    def forward(self, x):
        return x + self.offset


class HiddenConstant(nn.Module):
    """Adds a tensor that is neither a parameter nor a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.offset = torch.linspace(-1, 1, width)

    def forward(self, x):
        return x + self.offset


class RunningMean(nn.Module):
    """Subtracts a mean of earlier inputs, which each forward pass updates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.flatten(0, -2).mean(dim=0), 0.2)
        return x - self.mean


class RunningMaximum(nn.Module):
    """Records the largest input, as a quantisation observer does, and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return x / self.largest


class Observer(nn.Module):
    """Records the sum of its inputs, and does not use it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(width))

    def forward(self, x):
        self.total += x.detach().flatten(0, -2).sum(dim=0)
        return x


class Counter(nn.Module):
    """Counts forward passes, and does not use the number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x


class ExpandedBuffer(nn.Module):
    """Adds a buffer whose elements share memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((1,), 0.3).expand(width))

    def forward(self, x):
        return x + self.offset


class CausalMask(nn.Module):
    """Takes a mean over earlier positions with a triangular mask that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(16, 16).tril(), persistent=False)

    def forward(self, x):
        mask = self.mask[: x.shape[1], : x.shape[1]]
        return mask / mask.sum(dim=1, keepdim=True) @ x


class Positions(nn.Module):
    """Adds a learned vector for each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(16, width).normal_(std=0.3))

    def forward(self, x):
        return x + self.table[: x.shape[1]]


STATE_BLOCKS: dict[str, Block] = {
    "constant": block(lambda w: Constant(w, persistent=True)),
    "constant_not_saved": block(lambda w: Constant(w, persistent=False)),
    "hidden_constant": block(HiddenConstant),
    "expanded_buffer": block(ExpandedBuffer),
    "running_mean": block(RunningMean),
    "running_maximum": block(lambda _: RunningMaximum()),
    "observer": block(Observer),
    "counter": block(lambda _: Counter()),
    "causal_mask": block(lambda _: CausalMask(), needs_positions=True),
    "positions": block(Positions, needs_positions=True),
}
