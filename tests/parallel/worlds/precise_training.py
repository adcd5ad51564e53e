"""Training in 16 bits, compared with one process that makes copies of its weights by hand.

Two orders of the same sums differ by roundings of a unit 2^-8 (bfloat16), so results are compared
with bounds of a few units, relative to the largest gradient.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from parallel.worlds.layout_training import rank_block, small_shape, stages_of, token_batches
from unisono.parallel import CrossEntropy, Layout, Precision, TransformerModel, parallelize
from unisono.parallel.divisible.interfaces import Balanced

UNIT = 2**-8
LOSS_BOUND, GRADIENT_BOUND, CLIP = 2 * UNIT, 8 * UNIT, 0.1
BF16 = Precision(computation=torch.bfloat16)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def converted(x, dtype):
    return x.to(dtype) if x.is_floating_point() else x


def train_alone(
    model, loss, batches, dtype, scaler=None, clip=CLIP, optimizer=sgd, parts=1
):  # fmt: skip
    """Returns losses and norms of steps in one process, with copies of weights of this type.

    Gradients are added over the parts of a batch, by weight.
    """
    made, losses, norms = optimizer(list(model.parameters())), [], []
    balanced = [each for each in model.modules() if isinstance(each, Balanced)]
    for inputs, targets in batches:
        made.zero_grad()
        losses.append(0.0)
        for each in balanced:
            each.reset_auxiliary()
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            copies = {name: each.to(dtype) for name, each in model.named_parameters()}
            output = torch.func.functional_call(model, copies, converted(x, dtype))
            found = loss(output.to(torch.promote_types(dtype, torch.float32)), y)
            found = found * (len(x) / len(inputs))
            (found if scaler is None else scaler.scale(found)).backward()
            losses[-1] += float(found.detach())
        losses[-1] += sum(float(each.auxiliary_loss) for each in balanced)
        if scaler is not None:
            scaler.unscale_(made)
        norms.append(float(clip_grad_norm_(model.parameters(), clip)))
        if scaler is None:
            made.step()
        else:
            scaler.step(made)
            scaler.update()
    return losses, norms


def compare(text, make_model, make_loss, batches, *, microbatches=1, example=None, precision=BF16):
    """Fails if losses, norms, weights or bytes differ from those of one process."""
    torch.set_default_dtype(torch.float32)
    whole = make_model()
    before = {name: each.detach().clone() for name, each in whole.named_parameters()}
    losses, norms = train_alone(whole, make_loss(), batches, precision.computation)
    run = parallelize(
        make_model(), Layout.parse(text), loss=make_loss(), optimizer=sgd, clip=CLIP,
        microbatches=microbatches, example=example, precision=precision,
    )  # fmt: skip
    for step, batch in enumerate(batches):
        assert float(run.step(*batch)) == pytest.approx(losses[step], rel=LOSS_BOUND), step
        assert run.gradient_norm == pytest.approx(norms[step], rel=GRADIENT_BOUND), step
    changes = {name: each.detach() - before[name] for name, each in whole.named_parameters()}
    largest = max(float(each.abs().max()) for each in changes.values())
    for each in (held for found in run.sets for held in found.held):
        values, block = rank_block(run, each)
        assert values.dtype == torch.float32
        error = (values - before[each.name][block] - changes[each.name][block]).abs()
        worst = float(error.max()) if error.numel() else 0.0
        assert worst < GRADIENT_BOUND * largest, (each.name, worst, largest)
    report = run.report()
    assert report.bytes_sent == report.predicted.bytes_sent, (text, report)
    run.mesh.close()
    return report


def compare_transformer(text, *, microbatches=1, capacity_factor=None, context="ring",
                        precision=BF16, **changes):  # fmt: skip
    shape = small_shape(**{"layers": stages_of(text)} | changes)
    return compare(
        text,
        lambda: TransformerModel(shape, seed=1, capacity_factor=capacity_factor, context=context),
        lambda: CrossEntropy(shape.vocab),
        token_batches(shape),
        microbatches=microbatches,
        precision=precision,
    )


def half_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
                         nn.Linear(16, 3))  # fmt: skip


def half(interval=2, init_scale=2.0**24):
    return Precision(computation=torch.float16, init_scale=init_scale, growth_interval=interval)


def half_batches(steps=8):
    torch.manual_seed(6)
    found = [(torch.randn(16, 6), torch.rand(16, 3)) for _ in range(steps)]
    found[5] = (found[5][0], found[5][1] * 1e6)  # overflows
    return found
