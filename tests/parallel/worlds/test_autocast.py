"""Steps under autocast: each layout trains like one process under the same autocast.

The results differ by roundings of bfloat16, of 2^-8 each: gradients of layouts are compared with
bounds of a few roundings, relative to the largest gradient.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases_in_turn import turn
from parallel.worlds.layout_training import (
    expert_shape,
    rank_block,
    small_shape,
    stages_of,
    token_batches,
)
from parallel.worlds.traced_models import TracedDecoder
from unisono.parallel import CrossEntropy, Layout, TransformerModel, parallelize
from unisono.parallel.divisible.interfaces import Balanced

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
LOSS_BOUND, GRADIENT_BOUND = 2**-8, 2**-5


def test_autocast(outcome):
    outcome.require_success()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype=dtype)


def train_alone(model, loss, batches):
    """Returns losses and norms, of steps that compute the whole batch under autocast."""
    optimizer, losses, norms = sgd(model.parameters()), [], []
    balanced = [each for each in model.modules() if isinstance(each, Balanced)]
    for inputs, targets in batches:
        optimizer.zero_grad()
        for each in balanced:
            each.reset_auxiliary()
        with autocast():
            found = loss(model(inputs), targets)
        assert found.dtype == torch.float32
        found.backward()
        found = found + sum(each.auxiliary_loss for each in balanced)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        losses.append(float(found.detach()))
    return losses, norms


def compare(text, make_model, make_loss, batches, *, microbatches=1, example=None):
    torch.set_default_dtype(torch.float32)
    whole = make_model()
    before = {name: each.detach().clone() for name, each in whole.named_parameters()}
    losses, norms = train_alone(whole, make_loss(), batches)
    run = parallelize(
        make_model(), Layout.parse(text), loss=make_loss(), optimizer=sgd,
        microbatches=microbatches, clip=0.1, example=example,
    )  # fmt: skip
    with autocast():
        for step, batch in enumerate(batches):
            loss = float(run.step(*batch))
            assert loss == pytest.approx(losses[step], rel=LOSS_BOUND), step
            assert run.gradient_norm == pytest.approx(norms[step], rel=GRADIENT_BOUND), step
            assert torch.is_autocast_enabled("cpu")
    changes = {name: each.detach() - before[name] for name, each in whole.named_parameters()}
    largest = max(float(each.abs().max()) for each in changes.values())
    for each in (held for found in run.sets for held in found.held):
        values, block = rank_block(run, each)
        error = (values - before[each.name][block] - changes[each.name][block]).abs()
        worst = float(error.max()) if error.numel() else 0.0
        assert worst < GRADIENT_BOUND * largest, (each.name, worst, largest)
    run.mesh.close()


def compare_transformer(text, *, microbatches=1, capacity_factor=None, context="ring", **changes):
    shape = small_shape(**{"layers": stages_of(text)} | changes)
    compare(
        text,
        lambda: TransformerModel(shape, seed=1, capacity_factor=capacity_factor, context=context),
        lambda: CrossEntropy(shape.vocab),
        token_batches(shape),
        microbatches=microbatches,
    )


def own_data_parallelism_and_zero(world):
    for text, microbatches in (
        ("dp=4", 1), ("dp=4,zero=1", 2), ("dp=4,zero=2", 1), ("dp=4,zero=2", 2),
        ("dp=4,zero=3", 2), ("dp=4,zero=3,dp_replicate=2", 2),
    ):  # fmt: skip
        with turn(text=text, microbatches=microbatches):
            compare_transformer(text, microbatches=microbatches, tied=False)


def own_tensor_parallelism(world):
    for text in ("tp=4", "tp=4,sequence_parallel=1", "tp=2,dp=2,zero=3", "tp=4,tensor=2d"):
        for microbatches in (1, 2):
            with turn(text=text, microbatches=microbatches):
                compare_transformer(text, microbatches=microbatches)


def own_pipelines(world):
    for text, microbatches in (
        ("pp=4", 4), ("pp=2,dp=2,zero=3", 2), ("pp=2,tp=2", 2), ("pp=2,dp=2,vpp=2,schedule=zbv", 4)
    ):  # fmt: skip
        with turn(text=text):
            compare_transformer(text, microbatches=microbatches)


def own_sequences(world):
    for context in ("ring", "ulysses", "allgather"):
        with turn(context=context):
            compare_transformer("cp=2,dp=2", microbatches=2, context=context)


def own_experts(world):
    for text, microbatches in (
        ("dp=4,ep=4", 1), ("dp=2,tp=2,ep=2", 2), ("pp=2,dp=2,ep=2", 2), ("dp=4,ep=2,zero=3", 2)
    ):  # fmt: skip
        with turn(text=text):
            compare_transformer(text, microbatches=microbatches, **expert_shape())


def own_traced_pipelines(world):
    torch.set_default_dtype(torch.float32)
    shape = small_shape()
    batches = token_batches(shape)[:2]
    compare(
        "pp=2,dp=2",
        lambda: TracedDecoder(shape.vocab, shape.positions),
        lambda: CrossEntropy(shape.vocab),
        batches,
        microbatches=2,
        example=batches[0][0],
    )


class Converting(nn.Module):
    """Computes norms in float32, in the type of their inputs otherwise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            exact = x.to(torch.float32)
            x = layer((exact * torch.rsqrt(exact.square().mean(-1, keepdim=True))).to(x.dtype))
        return x.to(torch.float32)


def own_traced_conversions(world):
    """Tests that a traced conversion takes the type that its input has under autocast."""
    torch.manual_seed(6)
    batches = [(torch.randn(8, 8), torch.rand(8, 8)) for _ in range(2)]
    compare("pp=2,dp=2", Converting, nn.MSELoss, batches, microbatches=2, example=batches[0][0])


class Recomputed(nn.Module):
    """Calls one module twice and recomputes it in the backward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=False)
        return self.last(x)


def own_recomputation_and_losses_of_torch(world):
    torch.manual_seed(6)
    batches = [(torch.randn(8, 6), torch.rand(8, 3)) for _ in range(2)]
    for text, microbatches in (("dp=4", 1), ("dp=4,zero=2", 2), ("dp=4,zero=3", 2)):
        for make_loss in (nn.MSELoss, lambda: nn.functional.binary_cross_entropy_with_logits):
            with turn(text=text, loss=make_loss):
                compare(text, Recomputed, make_loss, batches, microbatches=microbatches)


def own_passes_of_the_program_between_steps(world):
    """Tests that weights which autocast converted before a step are not used after it."""
    torch.manual_seed(6)
    batch = torch.randn(8, 6), torch.rand(8, 3)
    model = Recomputed()
    run = parallelize(model, Layout(dp=4), loss=nn.MSELoss(), optimizer=sgd)
    with autocast():
        before = model(batch[0])
        run.step(*batch)
        after = model(batch[0])
    with autocast():
        assert torch.equal(after, model(batch[0]))
    assert not torch.equal(after, before)
    run.mesh.close()
