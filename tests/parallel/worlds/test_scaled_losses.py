"""Runs that compute in float16: losses are scaled as by torch's `GradScaler` in one process."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.nn.functional import mse_loss

from cases_in_turn import turn
from parallel.worlds.layout_training import (
    expert_shape,
    rank_block,
    small_shape,
    token_batches,
)
from parallel.worlds.precise_training import (
    adam,
    half,
    half_batches,
    half_model,
    sgd,
    train_alone,
)
from unisono.parallel import CrossEntropy, Layout, Precision, TransformerModel, parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)


def test_scaled_losses(outcome):
    outcome.require_success()


def scaled_alone(batches, parts):
    """Returns the losses of one process, and the factors of torch's `GradScaler` by step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    model, losses, factors = half_model(), [], []
    optimizer = adam(model.parameters())
    for batch in batches:
        found, _ = train_alone(
            model, mse_loss, [batch], torch.float16, scaler, clip=1.0, parts=parts,
            optimizer=lambda _: optimizer,
        )  # fmt: skip
        losses += found
        factors.append(scaler.get_scale())
    return losses, factors


def own_scaled_losses(world):
    """Tests that the factor of losses, the skipped steps and the losses are those of torch's
    `GradScaler` in one process."""
    torch.set_default_dtype(torch.float32)
    batches = half_batches()
    for text, microbatches in (
        ("dp=4", 2), ("dp=4,zero=1", 1), ("dp=4,zero=2", 2), ("dp=4,zero=3", 1), ("pp=4", 4),
        ("pp=2,dp=2,schedule=zb1p", 2), ("tp=2,dp=2", 1),
    ):  # fmt: skip
        with turn(text=text):
            layout = Layout.parse(text)
            losses, factors = scaled_alone(batches, layout.dp * microbatches)
            skipped = sum(b < a for a, b in zip([2.0**24, *factors], factors, strict=False))
            assert skipped > 2 and any(b > a for a, b in itertools.pairwise(factors))
            run = parallelize(
                half_model(), layout, loss=mse_loss, optimizer=adam, clip=1.0,
                microbatches=microbatches, precision=half(),
            )  # fmt: skip
            assert run.loss_scale == 2.0**24
            for step, batch in enumerate(batches):
                assert float(run.step(*batch)) == pytest.approx(losses[step], rel=0.01), step
                assert run.loss_scale == factors[step], step
            assert run.skipped_steps == skipped
            assert float(run.evaluate(*batches[0])) < losses[0]
            run.mesh.close()


def own_overflow_of_one_rank(world):
    """Tests that an overflow in the part of one rank changes the weights of none."""
    torch.set_default_dtype(torch.float32)
    inputs, targets = half_batches()[0]
    targets = targets.clone()
    targets[0] = 1e8
    for text in ("dp=4", "dp=4,zero=1", "dp=4,zero=3", "pp=2,dp=2"):
        with turn(text=text):
            run = parallelize(
                half_model(), Layout.parse(text), loss=mse_loss, optimizer=adam,
                microbatches=2, precision=half(),
            )  # fmt: skip
            held = [each.values for found in run.sets for each in found.held]
            before = [rank_block(run, each)[0].clone() for s in run.sets for each in s.held]
            run.step(inputs, targets)
            after = [rank_block(run, each)[0] for found in run.sets for each in found.held]
            assert held and all(map(torch.equal, before, after))
            assert (run.skipped_steps, run.loss_scale) == (1, 2.0**23)
            run.mesh.close()


def own_balance_losses_are_scaled(world):
    shape = small_shape(**expert_shape())
    batches = token_batches(shape)[:2]

    def make():
        return TransformerModel(shape, seed=1)

    torch.set_default_dtype(torch.float32)
    found = []
    for init_scale in (1.0, 2.0**10):
        run = parallelize(
            make(), Layout(dp=2, ep=2, tp=2), loss=CrossEntropy(shape.vocab), optimizer=sgd,
            precision=half(init_scale=init_scale), microbatches=2,
        )  # fmt: skip
        losses = [float(run.step(*batch)) for batch in batches]
        assert run.skipped_steps == 0
        found.append((*losses, run.gradient_norm))
        run.mesh.close()
    assert found[0] == pytest.approx(found[1], rel=0.01)


def own_checkpoints_in_other_precisions(world):
    """Tests that a checkpoint keeps the factor of losses, and loads in another layout and type."""
    torch.set_default_dtype(torch.float32)
    batches = half_batches()

    def start(text, precision):
        return parallelize(
            half_model(), Layout.parse(text), loss=mse_loss, optimizer=adam, clip=1.0,
            precision=precision, microbatches=2,
        )  # fmt: skip

    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    folder = Path(shared[0])
    run = start("dp=4,zero=1", half())
    run.step(*batches[0])  # overflows, so the optimizer has no states
    run.save(folder)
    assert run.skipped_steps == 1
    again = start("dp=2,pp=2", half())
    again.load(folder)
    assert (again.steps, again.skipped_steps, again.loss_scale) == (1, 1, 2.0**23)
    again.mesh.close()
    for _ in range(8):
        run.step(*batches[0])
    assert run.skipped_steps < run.steps - 2
    run.save(folder)
    state = run.loss_scale, run.skipped_steps, run.steps
    expected = [float(run.step(*batch)) for batch in batches[5:]], run.loss_scale
    run.mesh.close()
    for text, precision, bound in (
        ("dp=2,pp=2", half(), 0.01),
        ("dp=4,zero=3", Precision(computation=torch.bfloat16), 0.1),
        ("dp=4", Precision(parameters=torch.float64), 0.01),
        ("dp=4", Precision(parameters=torch.bfloat16), 0.1),
    ):
        with turn(text=text, precision=precision):
            again = start(text, precision)
            again.load(folder)
            assert again.steps == state[2]
            is_half = precision.computation == torch.float16
            if is_half:
                assert (again.loss_scale, again.skipped_steps) == state[:2]
            loss = float(again.step(*batches[6]))
            assert loss == pytest.approx(expected[0][1], rel=bound)
            again.mesh.close()


def own_hooks_get_unscaled_gradients(world):
    torch.set_default_dtype(torch.float32)
    found = []
    for init_scale in (1.0, 2.0**10):
        norms: list[float] = []
        model = half_model()
        model[0].weight.register_hook(lambda each, norms=norms: norms.append(float(each.norm())))
        run = parallelize(
            model, Layout(dp=4), loss=mse_loss, optimizer=sgd, precision=half(init_scale=init_scale)
        )
        run.step(*half_batches()[0])
        found.append((*norms, run.gradient_norm))
        run.mesh.close()
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1], rel=0.01)
