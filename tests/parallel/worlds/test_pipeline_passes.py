"""Passes of pipelines whose modules do more than map a tensor to a tensor, and passes that fail."""

from __future__ import annotations

import copy
import re
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel.worlds.layout_training import (
    SCHEDULES,
    compare_model,
    expert_shape,
    sgd,
    small_shape,
    token_batches,
    train_alone,
)
from parallel.worlds.traced_models import TracedLookups
from unisono.parallel import CrossEntropy, Layout
from unisono.parallel.layers import LayoutDropout, MixtureOfExperts
from unisono.parallel.run import parallelize
from unisono.parallel.run.pipeline.stage_messages import _KEPT_BUFFERS

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
WIDTH, SAMPLES = 6, 8


def test_pipeline_passes(outcome):
    outcome.require_success()


def vectors(*, steps=3, samples=SAMPLES):
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(steps, 2, samples, WIDTH, generator=generator, dtype=torch.float64)
    return [tuple(each.clone() for each in pair) for pair in drawn]


def compare(make_model, *, batches=None, loss=nn.functional.mse_loss, schedules=SCHEDULES, **rest):
    """Trains a model with schedules of two ranks, and compares it with one process."""

    def seeded():
        torch.manual_seed(1)
        return make_model()

    for schedule, chunks in schedules:
        compare_model(
            f"pp=2,vpp={chunks},schedule={schedule}",
            seeded,
            lambda: loss,
            vectors(steps=2) if batches is None else copy.deepcopy(batches),
            microbatches=4,
            clip=None,
            unpredicted=("pp",),
            **rest,
        )


def train_each(run, batches):
    """Takes a step for each batch. Returns losses, the batches they belong to, and errors."""
    losses, trained, errors = [], [], []
    for batch in batches:
        try:
            losses.append(float(run.step(*batch)))
            trained.append(batch)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return losses, trained, errors


# ---- results of stages


class Nested(nn.Module):
    """Passes a dict with a tuple, None, integers, a number, and a result without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        if isinstance(x, torch.Tensor):
            x = {"h": x, "skip": (2 * x, None), "own": self.own, "ids": x.argmax(1), "half": 0.5}
        h = torch.tanh(self.linear(x["h"])) + x["half"] * x["skip"][0] * x["own"]
        own = self.own.tanh() if x["half"] else None
        return x | {"h": h + x["ids"].unsqueeze(1), "own": own}


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x["h"] + x["skip"][0] * x["own"])


def own_nested_results(world):
    compare(lambda: nn.Sequential(*(Nested() for _ in range(5)), End()))


def own_results_that_no_message_carries(world):
    class Hidden(nn.Linear):
        def forward(self, x):
            return [super().forward(x), object()]

    for module, text in (
        (
            Hidden(WIDTH, WIDTH),
            "stage 0 of the pipeline returns a object, which no message can carry",
        ),
        (Growing(WIDTH, WIDTH), "expected results of one form in all microbatches of a step, got"),
    ):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        run = a_run(nn.Sequential(layers[0], module, End(), layers[2]), Layout(pp=2))
        with pytest.raises((ValueError, RuntimeError), match=text):
            run.step(*vectors()[0])
        run.mesh.close()


class Growing(nn.Linear):
    """Returns more in each call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        x = super().forward(x)
        return {"h": x, "skip": [x] * self.calls, "own": x}


def own_modules_that_a_sequence_calls_twice(world):
    """Tests modules with several places in a sequence, on one stage and on several."""

    def make(places):
        torch.manual_seed(1)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(max(places) + 1)]
        return nn.Sequential(*(layers[each] for each in places))

    for places in ((0, 1, 1, 2, 3, 4), (0, 1, 2, 3, 0, 1)):
        compare(lambda places=places: make(places))


def own_changes_in_place(world):
    compare(
        lambda: nn.Sequential(
            *(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(6))
        )
    )


def own_frozen_stages(world):
    def make(frozen):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        for each in frozen:
            model[each].requires_grad_(False)
        return model

    compare(lambda: make((0, 1, 2)))
    compare(lambda: make((3, 4, 5)), schedules=SCHEDULES[1:5])


# ---- forward passes that are observed, or that read from the run


class Watched(nn.Linear):
    """Keeps its inputs, and draws a random number in each forward pass."""

    seen: list[torch.Tensor]
    drawn: list[float]

    def forward(self, x):
        self.seen.append(x)
        self.drawn.append(float(torch.rand(())))
        return super().forward(x)


def own_forward_passes(world):
    """Tests that each module sees each microbatch once, with its values, and draws once."""
    batches = vectors(steps=2)
    for schedule, chunks in SCHEDULES:
        torch.manual_seed(1)
        model = nn.Sequential(*(Watched(WIDTH, WIDTH) for _ in range(4))).double()
        run = a_run(copy.deepcopy(model), Layout(pp=2, vpp=chunks, schedule=schedule))
        with torch.no_grad():
            Watched.seen, Watched.drawn = [], []
            inputs = batches[0][0].chunk(4)
            expected = [layers(x) for x in inputs for layers in _heads(model)]
        Watched.seen, Watched.drawn = seen, drawn = [], []
        torch.manual_seed(9)
        run.step(*batches[0])
        torch.manual_seed(9)
        assert drawn == [float(torch.rand(())) for _ in drawn]
        assert len(seen) == 8
        kept = [each.clone() for each in seen]
        for each in seen:
            assert any(torch.allclose(each, other) for other in expected), schedule
        Watched.seen = []
        run.step(*batches[1])  # must not write to values that the program has kept
        assert all(map(torch.equal, seen, kept))
        run.mesh.close()


def _heads(model):
    """Returns the parts of a sequence that begin with its first module, except the whole."""
    return [model[:count] for count in range(len(model))]


class Recomputed(nn.Module):
    def __init__(self, module, *, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def own_recomputed_dropout(world):
    generator = torch.Generator().manual_seed(2)
    drawn = torch.rand(2, 2, SAMPLES, 3, WIDTH, generator=generator, dtype=torch.float64)
    batches = [tuple(pair) for pair in drawn]

    def make(reentrant):
        torch.manual_seed(1)
        layers = [nn.Linear(WIDTH, WIDTH)]
        for number in range(4):
            dropout = LayoutDropout(0.5, seed=0, site=f"{number}", width=WIDTH)
            block = nn.Sequential(nn.Linear(WIDTH, WIDTH), dropout)
            layers.append(Recomputed(block, reentrant=reentrant))
        return nn.Sequential(*layers)

    compare(lambda: make(False), batches=batches)
    compare(lambda: make(True), batches=batches, schedules=SCHEDULES[:3])
    for split in SCHEDULES[3:]:
        with pytest.raises((ValueError, RuntimeError), match="use_reentrant=False or schedule"):
            compare(lambda: make(True), batches=batches, schedules=[split])
    compare_model(
        "dp=2",
        lambda: make(True),
        lambda: nn.functional.mse_loss,
        batches,
        microbatches=2,
        clip=None,
    )


class CalledTwice(nn.Module):
    """Calls a module, which `fully_shard` gathers, in two checkpoints."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.block = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.block, x, use_reentrant=self.reentrant))
        return x


def own_reentrant_checkpoints_of_gathered_modules(world):
    for text, reentrant in (("dp=2,zero=1", True), ("dp=2,zero=2", False), ("dp=2,zero=3", False)):
        compare_model(
            text,
            lambda reentrant=reentrant: CalledTwice(reentrant=reentrant),
            lambda: nn.functional.mse_loss,
            vectors(),
            microbatches=2,
            clip=None,
            unpredicted=("dp",),
        )
    for zero in (2, 3):
        run = a_run(CalledTwice(reentrant=True), Layout(dp=2, zero=zero))
        with pytest.raises(ValueError, match="use_reentrant=False or zero = 1 works"):
            run.step(*vectors()[0])
        run.mesh.close()


def own_recomputed_balance_losses(world):
    shape = small_shape(**expert_shape())
    generator = torch.Generator().manual_seed(3)
    batches = [
        tuple(
            torch.rand(8, 5, shape.hidden, generator=generator, dtype=torch.float64)
            for _ in range(2)
        )
    ]

    def make(reentrant):
        torch.manual_seed(1)
        layers = []
        for _ in range(2):
            experts = MixtureOfExperts(shape)
            for each in experts.parameters():
                nn.init.normal_(each, std=0.3)
            if reentrant is not None:
                experts = Recomputed(experts, reentrant=reentrant)
            layers += [nn.Linear(shape.hidden, shape.hidden), experts]
        return nn.Sequential(*layers)

    expected, _ = train_alone(make(None), nn.functional.mse_loss, batches, None)
    for text in ("dp=2", "pp=2", "pp=2,vpp=2,schedule=zbv"):
        for reentrant in (False, True) if "zbv" not in text else (False,):
            run = parallelize(
                make(reentrant),
                Layout.parse(text),
                loss=nn.functional.mse_loss,
                optimizer=sgd,
                microbatches=2,
            )
            found = float(run.step(*batches[0]))
            assert abs(found / expected[0] - 1) < 1e-12, (text, reentrant, found, expected)
            run.mesh.close()


def own_lookups_in_later_stages(world):
    shape = small_shape()
    batches = token_batches(shape)
    compare(
        lambda: TracedLookups(shape.vocab),
        schedules=SCHEDULES[1:5],
        batches=batches,
        loss=CrossEntropy(shape.vocab),
        example=batches[0][0],
    )


def own_checkpoints_of_traced_models(world):
    """Tests that constants and buffers of all kinds leave checkpoints equal in all layouts."""
    shape = small_shape()
    batches = token_batches(shape)
    losses, _ = train_alone(TracedLookups(shape.vocab), CrossEntropy(shape.vocab), batches, None)
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names, src=0)

    def traced_run(text):
        return parallelize(
            TracedLookups(shape.vocab),
            Layout.parse(text),
            loss=CrossEntropy(shape.vocab),
            optimizer=sgd,
            microbatches=2,
            example=batches[0][0],
        )

    texts = ("pp=2", "dp=2,zero=1", "pp=2,vpp=2,schedule=interleaved", "dp=2,zero=3", "pp=2")
    for number, text in enumerate(texts):
        run = traced_run(text)
        if number:
            run.load(Path(names[0]) / f"{number - 1}")
            found = float(run.step(*batches[1]))
            assert abs(found / losses[1] - 1) < 1e-12, (text, found, losses)
            run.load(Path(names[0]) / f"{number - 1}")
        else:
            run.step(*batches[0])
        run.save(Path(names[0]) / f"{number}")
        run.mesh.close()


# ---- memory


def own_memory_of_many_shapes(world):
    run = a_run(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), Layout(pp=2))
    torch.manual_seed(2)
    for length in [*range(1, 12), 3]:
        x = torch.rand(SAMPLES, length, WIDTH, dtype=torch.float64)
        run.step(x, x)
    (stage,) = run._passes.pipeline._stages
    link = stage._before or stage._after
    assert 1 < len(link._memory._kept) <= _KEPT_BUFFERS
    assert not stage._under_way and not stage.inputs and not stage._input_gradients
    run.mesh.close()


# ---- failures


class Failing(nn.Linear):
    """Raises in one of its forward passes, or in the backward pass of that pass."""

    fails_at, in_backward = 0, False

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        y = torch.tanh(super().forward(x))
        if self.calls == self.fails_at and not self.in_backward:
            raise KeyError("a bad sample")
        if self.calls == self.fails_at:
            y.register_hook(_raise)
        return y


def _raise(gradient):
    raise KeyError("a bad sample")


def a_run(model, layout, **changes):
    torch.set_default_dtype(torch.float64)
    options = {"loss": nn.functional.mse_loss, "optimizer": sgd, "microbatches": 4} | changes
    return parallelize(model.double(), layout, **options)


def require_training(model, run, batches, errors, causes):
    """Fails unless a step fails on all ranks with each cause, and the others train."""
    losses, trained, found = train_each(run, batches)
    expected, _ = train_alone(model, nn.functional.mse_loss, trained, None)
    assert losses == pytest.approx(expected, rel=1e-10)
    assert len(found) == errors and len(losses) == len(batches) - errors, found
    assert all(re.search(cause, each) for cause, each in zip(causes, found, strict=True)), found
    run.mesh.close()


def own_failures_of_passes(world):
    """Tests that all ranks raise the error of a stage, and train on afterwards."""
    batches = vectors(steps=4)
    for schedule, chunks in SCHEDULES:
        for place, at, in_backward in ((0, 1, False), (3, 6, False), (1, 6, True), (2, 5, True)):
            torch.manual_seed(1)
            model = nn.Sequential(*(Failing(WIDTH, WIDTH) for _ in range(4))).double()
            divided = copy.deepcopy(model)
            divided[place].fails_at, divided[place].in_backward = at, in_backward
            run = a_run(divided, Layout(pp=2, vpp=chunks, schedule=schedule))
            require_training(model, run, batches, 1, ["a bad sample"])


def own_failures_before_passes(world):
    """Tests a batch of another size, and wrong data of a parameter, on one rank only."""
    batches = vectors(steps=3)
    for text in ("pp=2", "pp=2,vpp=2,schedule=zbv", "dp=2", "dp=2,zero=1"):
        for bad in range(RANKS):
            torch.manual_seed(1)
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
            run = a_run(copy.deepcopy(model), Layout.parse(text))
            causes = [
                "passed different batches|as many targets as inputs",
                "expected data of shape",
            ]
            run.step = partial(_altered_step, run.step, run, world.rank == bad, [])
            require_training(model, run, [*batches, *vectors(steps=1)], 2, causes)


def _altered_step(step, run, is_bad, calls, x, y):
    """Takes a step. On one rank, the second step has another batch, the third wrong data."""
    calls.append(None)
    first = next(run.stages[0][1].parameters())
    data = first.data
    if is_bad and len(calls) == 3:
        first.data = torch.zeros(5)
    try:
        return step(x[:5] if is_bad and len(calls) == 2 else x, y)
    finally:
        if is_bad and len(calls) == 3:
            first.data = data


def own_failures_of_losses(world):
    """Tests a loss that fails. Only the rank of the last stage computes it."""

    def loss(output, targets):
        if float(targets.flatten()[0]) < 0:
            raise OSError("no such loss")
        return ((output - targets) ** 2).sum(), targets.numel()

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    for schedule, chunks in SCHEDULES:
        batches = vectors(steps=3)
        batches[1][1][4] = -1
        run = a_run(copy.deepcopy(model), Layout(pp=2, vpp=chunks, schedule=schedule), loss=loss)
        require_training(copy.deepcopy(model), run, batches, 1, ["no such loss"])
