"""Training with a layout, compared with training in one process.

The training uses gradient descent, so that the changes of the weights reveal each gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel.worlds.traced_models import TracedDecoder
from unisono.division import part_of
from unisono.parallel import Layout
from unisono.parallel.divisible.interfaces import Balanced
from unisono.parallel.layers import BatchPlace, CrossEntropy, LayoutDropout, TransformerModel
from unisono.parallel.run import ParallelRun, parallelize
from unisono.parallel.run.parameters.parameter_sets import HeldParameter
from unisono.pipeline import StageTask
from unisono.planner import Transformer

SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zb1p", 1),
    ("zbv", 2),
    ("dualpipev", 2),
)
"""Schedules of a pipeline, and the stages of a rank (`vpp`)."""

STEPS = 2
"""The second step begins with weights and optimizer states that the first has changed."""
TOLERANCE = 1e-12
FLOAT32_TOLERANCE = 1e-5
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
    context: str = "ring",
    is_causal: bool = True,
    **changes: Any,
) -> ParallelRun:
    """Trains a decoder with a layout. Fails if the result differs from training in one process.

    Compares losses, norms and weights with that process, and the bytes of the last step with their
    closed forms. By default, each stage of a pipeline has one layer.
    """
    shape = small_shape(**{"layers": stages_of(text)} | changes)
    batches = token_batches(shape, samples=samples)
    return compare_model(
        text,
        lambda: TransformerModel(
            shape,
            seed=1,
            is_causal=is_causal,
            context=context,
            dropout=dropout,
            capacity_factor=capacity_factor,
        ),
        lambda: CrossEntropy(shape.vocab),
        batches,
        microbatches=microbatches,
    )


def stages_of(text: str) -> int:
    """Returns the number of a layout's stages, but at least 2."""
    layout = Layout.parse(text)
    return max(2, layout.pp * max(layout.vpp, 1 + layout.rules.is_v))


def compare_schedules(stages: int) -> None:
    """Trains a decoder with every pipeline schedule, with as many microbatches as stages, and with
    twice as many. Fails if the result differs from training in one process.
    """
    for schedule, chunks in SCHEDULES:
        text = f"pp={stages},vpp={chunks},schedule={schedule}"
        for microbatches in (stages, 2 * stages):
            if schedule == "dualpipev" and microbatches < 2 * stages:
                continue  # the schedule needs at least two microbatches per rank
            compare_transformer(text, microbatches=microbatches, layers=6, hidden=8, heads=2)


def crowded_model(shape: Transformer) -> TransformerModel:
    """Returns a decoder of one layer, whose tokens all choose expert 0.

    The norm before the router adds 0.5 to each feature, and the router has weights for expert 0
    only.
    """
    made = TransformerModel(shape, seed=1)
    with torch.no_grad():
        made.get_parameter("layer0.network_norm.bias").add_(0.5)
        router = made.get_parameter("layer0.network.router.weight")
        router.zero_()
        router[0] = 0.1
    return made


def compare_model(
    text: str,
    make_model: Callable[[], nn.Module],
    make_loss: Callable[[], Callable[..., torch.Tensor]],
    batches: Sequence[tuple[torch.Tensor, ...]],
    *,
    microbatches: int = 1,
    clip: float | None = CLIP,
    example: torch.Tensor | None = None,
    unpredicted: tuple[str, ...] = (),
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd,
) -> ParallelRun:
    """Trains any model with a layout. Fails if the result differs from training in one process.

    `unpredicted`: the groups whose bytes have no closed form.
    """
    torch.set_default_dtype(torch.float64)
    whole = make_model()
    before = copy.deepcopy(whole)
    losses, norms = train_alone(whole, make_loss(), batches, clip, make_optimizer)
    assert clip is None or max(norms) > clip  # otherwise no gradient was clipped
    run = parallelize(
        make_model(),
        Layout.parse(text),
        loss=make_loss(),
        optimizer=make_optimizer,
        microbatches=microbatches,
        clip=clip,
        example=example,
    )
    for step, batch in enumerate(batches):
        loss = float(run.step(*batch))
        assert abs(loss / losses[step] - 1) < TOLERANCE, (text, step, loss, losses[step])
        assert abs(run.gradient_norm / norms[step] - 1) < TOLERANCE, (text, step, norms[step])
    report = run.report()
    measured, predicted = (
        {axis: row for axis, row in sent.items() if axis not in unpredicted}
        for sent in (report.bytes_sent, report.predicted.bytes_sent)
    )
    assert measured == predicted, (text, measured, predicted)
    compare_weights(run, whole, before)
    run.mesh.close()
    return run


def compare_weights(
    run: ParallelRun, whole: nn.Module, before: nn.Module, *, tolerance: float = TOLERANCE
) -> None:
    """Fails if this rank's blocks of the weights differ from the whole model's weights.

    The tolerance is relative to the largest change of the parameter since `before`, the model
    before the training, and so to its gradients. Some gradients, such as that of the bias of keys,
    are 0 except for rounding errors, so smaller changes than 1/100 of the largest do not count.
    """
    changes = {
        name: float((each.detach() - before.get_parameter(name).detach()).abs().max())
        for name, each in whole.named_parameters()
        if each.numel()
    }
    for held in (held for each in run.sets for held in each.held):
        expected = whole.get_parameter(held.name).detach()
        change = max(changes.get(held.name, 0.0), max(changes.values()) / 100)
        values, place = rank_block(run, held)
        if held.block.spans:  # joined ranges of one dimension
            dim, first = held.block.dim, held.block.start[held.block.dim]
            parts = [expected.narrow(dim, *each) for each in held.block.spans]
            expected = torch.cat(parts, dim)
            own = slice(place[dim].start - first, place[dim].stop - first)
            place = (*place[:dim], own, *place[dim + 1 :])
        errors = (values - expected[place]).abs()
        error = float(errors.max()) if errors.numel() else 0.0
        assert error <= tolerance * change, (held.name, error, change)


def rank_block(run: ParallelRun, held: HeldParameter) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Returns this rank's values of a parameter, and their place in the whole parameter."""
    values, start = held.values.detach(), list(held.block.start)
    if isinstance(values, DTensor):  # fully_shard also divides one dimension
        dim = values.placements[-1].dim
        is_expert = held.block.summed_over == "expert_tokens"
        ranks = run.mesh.ranks("expert_shard" if is_expert else "shard")
        start[dim] += part_of(values.shape[dim], ranks.index(run.mesh.rank), len(ranks))[0]
        values = values.to_local()
    block = zip(start, values.shape, strict=True)
    return values, tuple(slice(first, first + count) for first, count in block)


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


def chain(layout: Layout, microbatches: int) -> ParallelRun:
    """Returns a run of eight linear layers, without a step."""
    return parallelize(
        nn.Sequential(*(nn.Linear(3, 3) for _ in range(8))),
        layout,
        loss=nn.functional.mse_loss,
        optimizer=sgd,
        microbatches=microbatches,
    )


def compare_passes(run: ParallelRun) -> list[list[StageTask]]:
    """Fails if a rank of a pipeline ran other passes than its schedule has, or in another order.

    Returns the passes of each rank.
    """
    passes = run.passes()
    predicted, measured = (
        [[span.task for span in row] for row in passes[name].spans]
        for name in ("predicted", "measured")
    )
    assert measured == predicted, run.mesh.layout.text()
    return measured


def compare_in_float32(text: str, *, microbatches: int = 1, **changes: Any) -> None:
    """Trains a decoder in float32. Fails if a loss differs from that of one process."""
    torch.set_default_dtype(torch.float32)
    try:
        shape = small_shape(**changes)
        batches = token_batches(shape)
        expected, _ = train_alone(TransformerModel(shape, seed=1), CrossEntropy(), batches, CLIP)
        run = parallelize(
            TransformerModel(shape, seed=1),
            Layout.parse(text),
            loss=CrossEntropy(shape.vocab),
            optimizer=sgd,
            microbatches=microbatches,
            clip=CLIP,
        )
        for step, batch in enumerate(batches):
            found = float(run.step(*batch))
            error = abs(found / expected[step] - 1)
            assert error < FLOAT32_TOLERANCE, (text, step, found, expected[step])
        run.mesh.close()
    finally:
        torch.set_default_dtype(torch.float64)
