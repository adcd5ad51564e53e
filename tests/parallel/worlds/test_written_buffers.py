"""Buffers that forward passes write: refused on all ranks, unless each part writes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model, sgd
from unisono.parallel import Layout, parallelize

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
WIDTH = 6


def test_written_buffers(outcome):
    outcome.require_success()


class Observer(nn.Module):
    """Keeps a running mean of its inputs, or replaces a table, where `writes` is not empty."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes == "mean" or (self.writes == "some" and (x[:, 0] > 1e3).any()):
            self.mean.lerp_(x.detach().mean(0), 0.1)
        if self.writes == "table":
            self.table = torch.zeros(len(x))
        return x + self.mean.detach()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    return [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(3)]


def model(writes: str) -> nn.Module:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Observer(writes), nn.Linear(WIDTH, WIDTH))


def own_written_buffers_are_refused(world):
    for writes, text, microbatches in (
        ("mean", "dp=2", 1),
        ("mean", "dp=2,zero=3", 2),
        ("mean", "pp=2", 2),
        ("some", "dp=2", 1),
        ("table", "dp=2", 1),
    ):
        name = "table" if writes == "table" else "mean"
        with turn(writes=writes, text=text):
            run = parallelize(
                model(writes), Layout.parse(text), loss=nn.MSELoss(), optimizer=sgd,
                microbatches=microbatches,
            )  # fmt: skip
            inputs, targets = batches()[0]
            with torch.no_grad():
                inputs[-1] = 1e6  # the last rank writes
            before = [each.values.detach().clone() for found in run.sets for each in found.held]
            with pytest.raises(ValueError, match=rf"1\.{name}: the forward pass writes") as caught:
                run.step(inputs, targets)
            parts = Layout.parse(text).dp * microbatches  # stages of `pp` are no parts of a batch
            assert f"division of the batch into {parts} parts;" in str(caught.value)
            assert "\n" not in str(caught.value)
            after = [each.values.detach() for found in run.sets for each in found.held]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            run.mesh.close()


def own_other_buffers_are_not(world):
    for text, microbatches in (("dp=2", 2), ("pp=2", 2)):
        compare_model(
            text, lambda: model(""), lambda: nn.functional.mse_loss, batches(),
            microbatches=microbatches, unpredicted=("pp",),
        )  # fmt: skip


class Expanded(nn.Module):
    """Adds buffers whose elements share memory, under two names."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        offset = torch.full((1,), 0.3 + rank).expand(WIDTH)
        self.register_buffer("offset", offset)
        self.register_buffer("again", offset, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset + self.again


def own_buffers_that_share_memory(world):
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(Expanded(world.rank), nn.Linear(WIDTH, WIDTH))
    run = parallelize(model, Layout(dp=2), loss=nn.MSELoss(), optimizer=sgd)
    assert model[0].offset is model[0].again
    assert torch.equal(model[0].offset, torch.full((WIDTH,), 0.3))  # that of rank 0
    run.step(*batches()[0])
    run.mesh.close()


def normed(norm) -> nn.Module:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(norm(first), nn.Tanh(), norm(last))


def own_spectral_norms(world):
    """Tests vectors that a step updates once, and that depend on the weights alone."""
    for norm in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        for text, microbatches in (("dp=2", 1), ("dp=2", 2), ("dp=2,zero=1", 3)):
            with turn(norm=norm.__module__, text=text, microbatches=microbatches):
                compare_model(
                    text, lambda norm=norm: normed(norm), lambda: nn.functional.mse_loss,
                    batches(), microbatches=microbatches,
                )  # fmt: skip
