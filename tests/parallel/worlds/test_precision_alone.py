"""A run of one process that computes in bfloat16: it has the bits of copies made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from cases_in_turn import turn
from parallel.worlds.precise_training import BF16, CLIP, sgd, train_alone
from unisono.parallel import Layout, parallelize

pytestmark = pytest.mark.torch
RANKS = 1
BACKENDS = ("unisono",)


def test_precision_alone(outcome):
    outcome.require_success()


def make():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def own_bits(world):
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(6)
    batches = [(torch.randn(8, 6), torch.rand(8, 3)) for _ in range(4)]
    expected = train_alone(make(), mse_loss, batches, torch.bfloat16)
    for device, zero in (("cpu", 0), ("cpu", 1), ("cpu", 3), ("meta", 0), ("meta", 3)):
        with turn(device=device, zero=zero):
            with torch.device(device):
                model = make()
            torch.manual_seed(1)
            run = parallelize(
                model, Layout(zero=zero), loss=mse_loss, optimizer=sgd, clip=CLIP, precision=BF16
            )
            found = [(float(run.step(*batch)), run.gradient_norm) for batch in batches]
            assert [loss for loss, _ in found] == expected[0]
            assert [norm for _, norm in found] == pytest.approx(expected[1], rel=1e-6)
            run.mesh.close()
