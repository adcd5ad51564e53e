"""Batches of which each rank of dp passes its own part, compared with one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from cases_in_turn import turn
from parallel.worlds.layout_training import sgd, small_shape
from parallel.worlds.own_loss_models import POSITIONS, VOCAB, WIDTH, Decoder, compare, token_batches
from unisono.parallel import CrossEntropy, Layout, TransformerModel, model_loss, parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)


def test_local_batches(outcome):
    outcome.require_success()


def part_of(run, batch, sizes):
    """Returns the samples of this rank of dp, of which each has one of `sizes`."""
    first = sum(sizes[: run.data_parallel_rank])
    end = first + sizes[run.data_parallel_rank]
    return {key: each[first:end] for key, each in batch.items()}


def passing(sizes, who=lambda rank: True):
    def passed(run, batch):
        assert run.data_parallel_size == len(sizes)
        part = part_of(run, batch, sizes)
        return (part if who(run.mesh.rank) else None,)

    return passed


def own_parts_of_different_sizes(world):
    batches = token_batches(samples=9)
    for text, microbatches, sizes in (
        ("dp=4", 1, (4, 1, 2, 2)),
        ("dp=4", 2, (4, 1, 2, 2)),
        ("dp=4", 3, (0, 1, 6, 2)),
        ("dp=4,zero=1", 2, (3, 3, 2, 1)),
        ("dp=4,zero=2", 2, (3, 3, 2, 1)),
        ("dp=4,zero=3,dp_replicate=2", 2, (3, 3, 2, 1)),
    ):
        with turn(text=text, microbatches=microbatches, sizes=sizes):
            compare(
                text, Decoder, batches, passed=passing(sizes), microbatches=microbatches,
                batch="local",
            )  # fmt: skip


def own_parts_from_one_of_the_ranks_that_share_them(world):
    batches = token_batches(samples=9)
    shape = small_shape(vocab=VOCAB, positions=POSITIONS)

    def call(model, batch):
        return model(batch["input_ids"])

    def loss(output, batch):
        return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())

    for who in (lambda rank: True, lambda rank: rank in (1, 2)):
        with turn(passes=[who(rank) for rank in range(4)]):
            compare(
                "dp=2,tp=2",
                lambda: TransformerModel(shape, seed=1, dropout=0.0),
                batches,
                alone=lambda model, batch: loss(call(model, batch), batch),
                loss=loss,
                call=call,
                passed=passing((5, 4), who),
                microbatches=2,
                batch="local",
            )
    ten = token_batches(samples=10)
    wide = small_shape(vocab=VOCAB, positions=8)
    for who in (lambda rank: True, lambda rank: rank in (0, 1), lambda rank: rank in (2, 3)):
        with turn(pipeline=[who(rank) for rank in range(4)]):
            compare(
                "dp=2,pp=2",
                lambda: TransformerModel(shape, seed=1),
                ten,
                alone=lambda model, batch: loss(call(model, batch), batch),
                loss=loss,
                call=call,
                passed=passing((6, 4), who),
                microbatches=2,
                batch="local",
            )
    for text in ("cp=2,dp=2", "cp=4"):
        sizes = (5, 4) if "dp" in text else (9,)
        eight = [
            {key: each.repeat(1, 4)[:, :8] for key, each in batch.items()} for batch in batches
        ]
        with turn(text=text):
            compare(
                text,
                lambda: TransformerModel(wide, seed=1),
                eight,
                alone=lambda model, batch: loss(call(model, batch), batch),
                loss=loss,
                call=call,
                passed=passing(sizes, lambda rank: rank in (0, 2)),
                batch="local",
            )


def own_traced_pipelines(world):
    batches = token_batches(samples=8)
    compare(
        "dp=2,pp=2", Decoder, batches, passed=passing((4, 4)), microbatches=2, batch="local",
        example={key: each[:4] for key, each in batches[0].items()},
    )  # fmt: skip


class Ends(nn.Module):
    """The last module of a sequence, which computes the loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return {"loss": functional.mse_loss(self.layer(x), torch.ones(len(x), 4))}


def sequence():
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(7)), Ends())


def own_pipelines_with_divided_weights(world):
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(3)
    batches = [{"input": torch.rand(12, WIDTH, generator=generator)} for _ in range(2)]
    for text, microbatches in (
        ("dp=2,pp=2,zero=2", 2),
        ("dp=2,pp=2,zero=3", 2),
        ("dp=2,pp=2,zero=3,vpp=2,schedule=interleaved", 2),
        ("pp=4,schedule=zb1p", 4),
        ("pp=4,vpp=2,schedule=zbv", 4),
    ):
        with turn(text=text):
            sizes = (8, 4) if "dp" in text else (12,)
            compare(
                text, sequence, batches, passed=passing(sizes), microbatches=microbatches,
                batch="local",
            )  # fmt: skip


def own_inputs_and_targets(world):
    torch.set_default_dtype(torch.float64)
    shape = small_shape(vocab=VOCAB, positions=POSITIONS)
    (batch, *_) = token_batches(samples=9)
    losses = []
    for kind in ("global", "local"):
        run = parallelize(
            TransformerModel(shape, seed=1, dropout=0.3),
            Layout(dp=2, tp=2),
            loss=CrossEntropy(VOCAB),
            optimizer=sgd,
            batch=kind,
        )
        own = part_of(run, batch, (5, 4)) if kind == "local" else batch
        given = own["input_ids"], own["labels"]
        if kind == "local" and world.rank % 2:
            given = None, None
        losses.append([float(run.step(*given)) for _ in range(2)])
        losses[-1].append(float(run.evaluate(*given)))
        run.mesh.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def local_run(text, **options):
    torch.set_default_dtype(torch.float64)
    return parallelize(
        Decoder() if "tp" not in text else TransformerModel(small_shape(vocab=VOCAB), seed=1),
        Layout.parse(text),
        loss=model_loss if "tp" not in text else CrossEntropy(VOCAB),
        optimizer=sgd,
        batch="local",
        **options,
    )


def refused(run, match, *arguments, **options):
    for action in (run.step, run.evaluate):
        with pytest.raises(ValueError, match=match) as caught:
            action(*arguments, **options)
        assert "\n" not in str(caught.value)


def own_refusals(world):
    (batch, *_) = token_batches()
    for text in ("dp=4", "dp=4,zero=3"):
        run = local_run(text)
        part = part_of(run, batch, (2, 2, 2, 2))
        bad = part | {"labels": part["labels"][:1]}
        match = "labels: expected 2 samples, as input_ids has, got 1"
        refused(run, match, bad if world.rank == 1 else part)
        refused(run, "rank 2 passed no part of the batch", None if world.rank == 2 else part)
        empty = {key: each[:0] for key, each in part.items()}
        refused(run, "needs at least one sample, got parts without samples on all ranks", empty)
        match = "rank 0 divides the batch into 1 microbatches and rank 3 into 2"
        refused(run, match, part, microbatches=1 + (world.rank == 3))
        run.step(part)
        run.mesh.close()
    run = local_run("dp=2,tp=2")
    own = part_of(run, batch, (4, 4))
    pair = own["input_ids"], own["labels"]
    other = (pair[0] + (world.rank == 1)) % VOCAB, pair[1]
    refused(run, "ranks 0, 1 have one data_parallel_rank, but passed different parts", *other)
    refused(run, "passed no part of the batch", None, None)
    run.step(*pair)
    run.mesh.close()
    torch.set_default_dtype(torch.float64)
    with pytest.raises(ValueError, match="batch: expected 'global' or 'local', got 'own'"):
        parallelize(nn.Linear(2, 2), Layout(dp=4), loss=nn.MSELoss(), optimizer=sgd, batch="own")
