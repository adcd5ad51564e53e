"""Recommendation models on four ranks: mixed placements, and checkpoints that other numbers of
ranks load.
"""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from parallel.worlds.dlrm_training import click_batches, compare_dlrm, small_shape
from parallel.worlds.layout_training import STEPS, TOLERANCE
from parallel.worlds.test_layout_checkpoint import shared_folder
from unisono.parallel import Layout
from unisono.parallel.recommendation import DLRM, TableShape
from unisono.parallel.run import ParallelRun, parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)


def test_dlrm_4(outcome):
    outcome.require_success()


def own_each_kind(world):
    for kind in ("table", "row", "column", "replicated"):
        compare_dlrm("dp=4", kind)


def own_every_kind_at_once_by_the_cost_model(world):
    sizes = [(40, 1), (3, 1), (60, 30), (12, 2), (2, 1), (20, 1)]
    tables = tuple(TableShape(rows=rows, ids=ids) for rows, ids in sizes)
    run = compare_dlrm("dp=4,zero=1", "auto", tables=tables)
    kinds = {table.kind for table in run.stages[0][1].placement.tables}
    assert kinds == {"row", "column", "table", "replicated"}


def own_hybrid_shards(world):
    for kind in ("table", "row", "column", "replicated"):
        compare_dlrm("dp=4,zero=1,dp_replicate=2", kind, microbatches=2)


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.01)


def a_run(text: str, kind: str) -> ParallelRun:
    torch.set_default_dtype(torch.float64)
    return parallelize(
        DLRM(small_shape(), seed=2, placement=kind),
        Layout.parse(text),
        loss=functional.binary_cross_entropy_with_logits,
        optimizer=adagrad,
    )


def losses_alone(steps: int) -> list[float]:
    torch.set_default_dtype(torch.float64)
    model = DLRM(small_shape(), seed=2)
    optimizer, found = adagrad(list(model.parameters())), []
    for step in range(steps):
        inputs, targets = click_batches(small_shape())[step % STEPS]
        optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(model(inputs), targets)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def train(run: ParallelRun, steps: int) -> list[float]:
    batches = click_batches(small_shape())
    return [float(run.step(*batches[run.steps % STEPS])) for _ in range(steps)]


def own_tables_move_to_other_ranks_with_a_checkpoint(world):
    expected = losses_alone(4)
    places = [
        ("dp=4", "table"),
        ("dp=4,zero=1", "row"),
        ("dp=4", "column"),
        ("dp=4,zero=1", "replicated"),
    ]
    for (text, kind), (next_text, next_kind) in zip(places, places[1:] + places[:1], strict=True):
        folder = shared_folder()
        first = a_run(text, kind)
        assert train(first, 2) == pytest.approx(expected[:2], rel=TOLERANCE)
        first.save(folder)
        after = a_run(next_text, next_kind)
        after.load(folder)
        assert train(after, 2) == pytest.approx(expected[2:], rel=TOLERANCE), (kind, next_kind)
        for run in (first, after):
            run.mesh.close()
    dist.barrier()
