"""Evaluations, which change nothing, and numbers of microbatches that change between steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from cases_in_turn import turn
from parallel.worlds.layout_training import sgd
from parallel.worlds.own_loss_models import (
    WIDTH,
    Classifier,
    Decoder,
    compare,
    loss_of_whole,
    refused,
    run_of,
    sequence,
    token_batches,
    values,
)
from unisono.parallel import Layout, parallelize

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)


def test_evaluations(outcome):
    outcome.require_success()


class Drawing(Decoder):
    def logits(self, input_ids, attention_mask):
        found = super().logits(input_ids, attention_mask)
        return found + torch.rand_like(found)


def own_dropout_of_traced_pipelines(world):
    """Tests that an evaluation leaves out the dropout of a graph, and later steps do not."""
    torch.set_default_dtype(torch.float64)
    (batch, *_) = token_batches()
    run = run_of(Decoder(drop=0.4), "pp=2", microbatches=2, example=batch)
    expected = float(loss_of_whole(Decoder(), batch).detach())
    for _ in range(2):
        assert float(run.evaluate(batch)) == pytest.approx(expected, rel=1e-12)
    assert abs(float(run.step(batch)) / expected - 1) > 1e-4
    run.mesh.close()
    run = run_of(Drawing(), "pp=2", microbatches=2, example=batch)
    with pytest.raises(ValueError, match="the traced model draws random numbers with aten"):
        run.evaluate(batch)
    run.step(batch)
    run.mesh.close()


def own_numbers_of_microbatches_that_change(world):
    batches = token_batches(steps=4)
    counts = iter((2, 1, 4, 2) * 8)
    for text, example in (("dp=2", None), ("dp=2,zero=3", None)):
        with turn(text=text):

            def passed(run, batch):
                run.microbatches = next(counts)
                return (batch,)

            compare(text, Decoder, batches, passed=passed, example=example)
    pairs = [{"left": each["values"], "right": each["values"].flip(0)} for each in values(1, 8)]
    run = run_of(sequence(), "pp=2", microbatches=2)
    alone = sequence()
    for count in (2, 4, 8, 2):
        expected = float(alone(pairs[0]).loss)
        assert float(run.evaluate(pairs[0], microbatches=count)) == pytest.approx(
            expected, rel=1e-12
        )
    losses = [
        float(run.step(each, microbatches=n)) for each, n in zip(pairs, (4, 2, 8), strict=True)
    ]
    run.mesh.close()
    run = run_of(sequence(), "pp=2", microbatches=2)
    assert losses == pytest.approx([float(run.step(each)) for each in pairs], rel=1e-12)
    refused(run, "needs at least 2 microbatches, not 1", pairs[0], microbatches=1)
    refused(run, "microbatches: expected at least 1, got 0", pairs[0], microbatches=0)
    run.step(pairs[0])
    run.mesh.close()
    run = run_of(Classifier("labels"))
    match = "rank 0 divides the batch into 1 microbatches and rank 1 into 2"
    refused(run, match, values("labels")[0], microbatches=1 + world.rank)
    run.mesh.close()


def own_pipelines_with_different_numbers_of_microbatches(world):
    """Tests that no rank waits for a message of a microbatch that another rank does not have."""
    (batch, *_) = [{"left": each["values"], "right": each["values"]} for each in values(1, 8)]
    for changed in (0, 1):
        run = run_of(sequence(), "pp=2", microbatches=2)
        run.step(batch)
        with pytest.raises(ValueError, match=r"into \d microbatches, and the next stage into"):
            run.step(batch, microbatches=4 if world.rank == changed else 2)
        with pytest.raises(Exception, match="this run has ended"):
            run.step(batch)
        run.mesh.close()


def own_evaluations_change_nothing(world):
    batches = token_batches()
    held_out = {key: each[:6] for key, each in token_batches(4)[3].items()}
    for text, microbatches, example in (
        ("dp=2", 3, None),
        ("dp=2,zero=1", 1, None),
        ("dp=2,zero=2", 2, None),
        ("dp=2,zero=3", 2, None),
        ("pp=2", 2, batches[0]),
    ):
        with turn(text=text):
            evaluated(text, microbatches, example, batches, held_out)


def evaluated(text, microbatches, example, batches, held_out):
    """Trains twice, with evaluations and without; both trainings must have the same bits."""
    found = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        run = run_of(Decoder(drop=0.2 if example is None else 0.0), text,
                     microbatches=microbatches, example=example)  # fmt: skip
        losses = []
        for step, batch in enumerate(batches):
            if evaluates:
                if step:
                    before = run.report()
                other = held_out if example is None else batches[-1]
                with torch.random.fork_rng():
                    alone = Decoder()
                if step == 0:
                    expected = float(loss_of_whole(alone.eval(), other))
                    assert float(run.evaluate(other)) == pytest.approx(expected, rel=1e-12)
                again = [float(run.evaluate(other)) for _ in range(2)]
                assert again[0] == again[1]
                if step:
                    assert run.report() == before
                assert run.steps == step == len(run.step_s)
                assert all(stage.training for _, stage in run.stages)
            losses.append(float(run.step(batch)))
        found.append((losses, run.gradient_norm, torch.get_rng_state().tolist()))
        sent = run.report()
        assert text == "dp=2,zero=1" or sent.bytes_sent == sent.predicted.bytes_sent
        run.mesh.close()
    assert found[0] == found[1]


class Counting(nn.Module):
    """A module that changes buffers and attributes in every pass, and draws numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)
        self.passes, self.modes = 0, None

    def forward(self, values, labels):
        self.calls.add_(1)
        self.last = values.sum()
        self.passes += 1
        self.modes = self.training, torch.is_grad_enabled()
        torch.rand(3)
        return functional.mse_loss(self.layer(values), labels), None


def own_state_after_an_evaluation(world):
    torch.set_default_dtype(torch.float64)
    model = Counting()
    frozen = nn.BatchNorm1d(4).eval()
    model.frozen = frozen
    loss = nn.MSELoss()
    run = parallelize(
        model, Layout(dp=2), loss=lambda output, batch: loss(output[0], output[0]) * 0 + output[0],
        weight=lambda batch: batch["labels"].numel(), optimizer=sgd,
    )  # fmt: skip
    before, gradients = torch.get_rng_state(), [each.grad for each in model.parameters()]
    with pytest.raises(ValueError, match="calls: the forward pass writes this buffer"):
        run.evaluate(values("labels")[0])
    assert float(model.calls) == 0 and model.last is None and model.passes == 0
    assert model.training and not frozen.training and loss.training
    assert torch.equal(before, torch.get_rng_state())
    assert all(x.grad is y for x, y in zip(model.parameters(), gradients, strict=True))
    run.mesh.close()
