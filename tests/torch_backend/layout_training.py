"""Training with a layout, compared with training in one process.

The training uses float64 and plain gradient descent, so that the weights after each step reveal
each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_backend.traced_models import TracedDecoder
from unisono.parallel import Layout
from unisono.parallel.divisible import Balanced
from unisono.parallel.layers import BatchPlace, CrossEntropy, LayoutDropout, TransformerModel
from unisono.parallel.run import ParallelRun, parallelize
from unisono.planner import Transformer, part_of

STEPS = 3
TOLERANCE = 1e-12
RATE = 0.5
CLIP = 0.4


def small_shape(**changes: Any) -> Transformer:
    """Returns a decoder with sizes, such as the vocabulary of 11, that are not divisible by the
    number of ranks.
    """
    sizes: dict[str, Any] = {
        "layers": 4,
        "hidden": 24,
        "heads": 4,
        "vocab": 11,
        "positions": 12,
        "tied": True,
    }
    return Transformer(**(sizes | changes))


def expert_shape(**changes: Any) -> dict[str, Any]:
    """Returns the changes to `small_shape` for a mixture of experts whose first layer is dense."""
    sizes = {"experts": 4, "top_k": 2, "expert_ffn": 10, "dense_layers": 1, "tied": False}
    return {"layers": 3, "gated": True, "shared_experts": 1} | sizes | changes


def token_batches(shape: Transformer, *, samples: int = 8) -> list[tuple[torch.Tensor, ...]]:
    """Returns the batches of all steps. Some targets are ignored, a different number in each
    sample.
    """
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        text = torch.randint(0, shape.vocab, (samples, shape.positions + 1), generator=generator)
        targets = text[:, 1:].clone()
        targets[0, 3:], targets[samples // 2, :2] = -100, -100
        found.append((text[:, :-1], targets))
    return found


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def train_alone(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    batches: Sequence[tuple[torch.Tensor, ...]],
    clip: float | None,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd,
) -> tuple[list[float], list[float]]:
    """Trains a model in this process. Returns the losses and the norms of the gradients."""
    optimizer, losses, norms = make_optimizer(list(model.parameters())), [], []
    for step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        for module in model.modules():
            if isinstance(module, LayoutDropout):
                module.place = BatchPlace(step=step)
        balanced = [each for each in model.modules() if isinstance(each, Balanced)]
        for each in balanced:
            each.reset_auxiliary()
        found = loss(model(inputs), targets)
        found.backward()  # also adds the gradients of the experts' balance losses
        found = found.detach() + sum(each.auxiliary_loss for each in balanced)
        limit = torch.inf if clip is None else clip
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        losses.append(float(found))
    return losses, norms


def compare_transformer(
    text: str,
    *,
    microbatches: int = 1,
    samples: int = 8,
    dropout: float = 0.0,
    capacity_factor: float | None = None,
    **changes: Any,
) -> ParallelRun:
    """Trains a decoder with a layout. Fails if the result differs from training in one process.

    Compares losses, norms and weights with that process, and the bytes of the last step with their
    closed forms.
    """
    shape = small_shape(**changes)
    batches = token_batches(shape, samples=samples)
    return compare_model(
        text,
        lambda: TransformerModel(shape, seed=1, dropout=dropout, capacity_factor=capacity_factor),
        lambda: CrossEntropy(shape.vocab),
        batches,
        microbatches=microbatches,
    )


def compare_model(
    text: str,
    make_model: Callable[[], nn.Module],
    make_loss: Callable[[], Callable[..., torch.Tensor]],
    batches: Sequence[tuple[torch.Tensor, ...]],
    *,
    microbatches: int = 1,
    clip: float | None = CLIP,
    example: torch.Tensor | None = None,
) -> ParallelRun:
    """Trains any model with a layout. Fails if the result differs from training in one process."""
    torch.set_default_dtype(torch.float64)
    whole = make_model()
    losses, norms = train_alone(whole, make_loss(), batches, clip)
    run = parallelize(
        make_model(),
        Layout.parse(text),
        loss=make_loss(),
        optimizer=sgd,
        microbatches=microbatches,
        clip=clip,
        example=example,
    )
    for step, batch in enumerate(batches):
        loss = float(run.step(*batch))
        assert abs(loss / losses[step] - 1) < TOLERANCE, (text, step, loss, losses[step])
        assert abs(run.gradient_norm / norms[step] - 1) < TOLERANCE, (text, step, norms[step])
    report = run.report()
    predicted = report.predicted.bytes_sent
    measured = {axis: row for axis, row in report.bytes_sent.items() if axis in predicted}
    assert measured == predicted, (text, measured, predicted)
    compare_weights(run, whole)
    run.mesh.close()
    return run


def compare_weights(run: ParallelRun, whole: nn.Module) -> None:
    """Fails if this rank's blocks of the weights differ from the whole model's weights."""
    for held in (held for each in run.sets for held in each.held):
        expected = whole.get_parameter(held.name)
        values, start = held.values, list(held.block.start)
        if isinstance(values, DTensor):  # fully_shard also divides one dimension
            dim = values.placements[-1].dim
            is_expert = held.block.summed_over == "expert_tokens"
            ranks = run.mesh.ranks("expert_shard" if is_expert else "shard")
            start[dim] += part_of(values.shape[dim], ranks.index(run.mesh.rank), len(ranks))[0]
            values = values.to_local()
        block = tuple(
            slice(first, first + count) for first, count in zip(start, values.shape, strict=True)
        )
        error = (values - expected[block]).abs().max() if values.numel() else torch.zeros(())
        assert error <= TOLERANCE * expected.abs().max(), (held.name, float(error))


def compare_traced(text: str, *, microbatches: int) -> ParallelRun:
    """Trains a model by its traced graph. Fails if the result differs from one process."""
    shape = small_shape()
    batches = token_batches(shape)
    return compare_model(
        text,
        lambda: TracedDecoder(shape.vocab, shape.positions),
        lambda: CrossEntropy(shape.vocab),
        batches,
        microbatches=microbatches,
        example=batches[0][0],
    )
