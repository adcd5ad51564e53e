"""Training whose gradients are summed in small buckets while passes run."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from parallel.worlds.layout_training import sgd, train_alone
from unisono.parallel import Layout, TrainingMesh
from unisono.parallel.run import parallelize
from unisono.parallel.run.parameters import flat_sets
from unisono.parallel.run.parameters.gradient_sums import OverlappedSums


@contextmanager
def small_buckets(*, everywhere=False):
    """Yields a list that gets, for each bucket, whether its sum began during a backward pass.

    `everywhere`: sums within a host overlap passes, too.
    """
    early = []
    submit = OverlappedSums._submit

    def noted(sums, bucket):
        early.append(sums._in_last_pass)
        submit(sums, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_sets, "_BUCKET_BYTES", 500)
        patch.setattr(OverlappedSums, "_submit", noted)
        if everywhere:
            patch.setattr(TrainingMesh, "overlaps", lambda mesh, name: mesh.layout.zero < 2)
        yield early


class Unsettled(nn.Module):
    """Layers of which each rank may leave some out, or call them in another order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.unused = nn.Linear(6, 6)
        self.order = [0, 1, 2, 3, 4]

    def forward(self, x):
        parts = [torch.tanh(self.layers[number](x)) for number in self.order]
        return torch.stack(parts).sum(0)


def batches(steps=3):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator))
            for _ in range(steps)]  # fmt: skip


def a_run(model, text="dp=4", **changes):
    torch.set_default_dtype(torch.float64)
    return parallelize(
        model, Layout.parse(text), loss=nn.functional.mse_loss, optimizer=sgd, **changes
    )


def compare_steps(run, model, prepare=lambda module, step: None):
    """Takes steps. Fails if a loss differs from one process, which trains `model`."""
    found = []
    for step, batch in enumerate(batches()):
        prepare(run.stages[0][1], step)
        found.append(float(run.step(*batch)))
    expected, _ = train_alone(model, nn.functional.mse_loss, batches(), None)
    assert found == pytest.approx(expected, rel=1e-12)
    for name, each in run.stages[0][1].named_parameters():
        assert torch.allclose(each, model.get_parameter(name), rtol=1e-11, atol=1e-13), name
