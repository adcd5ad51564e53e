"""Click logs, and recommendation models that are trained on them by launched ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch
from torch import distributed as dist
from torch.nn import functional

from unisono.parallel import DLRM
from unisono.planner import Layout
from unisono.train import LayoutRun, launch_layout
from unisono.train.click_logs import CLICK_SHAPE, click_log
from unisono.train.layout_tasks import build_task
from unisono.train.layout_training import train_layout

pytestmark = pytest.mark.torch
SAMPLES = 4096


def test_logs_follow_from_the_seed_and_fit_the_tables() -> None:
    inputs, clicks = click_log(CLICK_SHAPE, samples=SAMPLES, seed=1)
    again, _ = click_log(CLICK_SHAPE, samples=SAMPLES, seed=1)
    other, _ = click_log(CLICK_SHAPE, samples=SAMPLES, seed=2)
    assert torch.equal(inputs, again) and not torch.equal(inputs, other)
    assert inputs.shape == (SAMPLES, CLICK_SHAPE.columns) and inputs.dtype == torch.int64
    assert 0.4 < clicks.mean() < 0.6
    counters, *places = inputs.split([13, *(table.ids for table in CLICK_SHAPE.tables)], dim=1)
    assert counters.min() >= 0
    for table, found in zip(CLICK_SHAPE.tables, places, strict=True):
        assert found.min() == -1 and found.max() < table.rows
        empty = (found == -1).all(1).double().mean()
        assert 0.08 < empty < 0.12


def test_ids_follow_a_power_law() -> None:
    """Tests that the k-th most frequent id of a table has a share of about k^-1.1."""
    (_, history, *_) = CLICK_SHAPE.tables
    inputs, _ = click_log(CLICK_SHAPE, samples=16_384, seed=0)
    places = inputs[:, 14 : 14 + history.ids]
    counts = torch.bincount(places[places >= 0], minlength=history.rows).double()
    ranks = torch.arange(1, history.rows + 1).double()
    # The share of ids in [k, k + 1) under the density x^-1.1, from which the logs are drawn.
    expected = (ranks**-0.1 - (ranks + 1) ** -0.1) / (1 - (history.rows + 1) ** -0.1)
    found = counts.sort(descending=True).values / counts.sum()
    assert torch.allclose(found[:50], expected[:50], rtol=0.1)
    assert counts[:100].sum() < 0.2 * counts.sum()  # frequent ids are spread over the whole table


def test_a_model_learns_the_clicks() -> None:
    shape = replace(CLICK_SHAPE, tables=CLICK_SHAPE.tables[-6:])
    inputs, clicks = click_log(shape, samples=SAMPLES, seed=0)
    model = DLRM(shape, seed=0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    losses = []
    for step in range(40):
        part = slice(step % 16 * 256, (step % 16 + 1) * 256)
        optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(model(inputs[part]), clicks[part])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])


def a_run(layout: str, **changes: Any) -> LayoutRun:
    parsed = Layout.parse(layout)
    run = LayoutRun(
        task="dlrm",
        ranks=parsed.devices,
        layout=parsed,
        steps=2,
        batch=30,
        microbatches=1,
        learning_rate=0.02,
        clip=1.0,
        seed=3,
        dtype="float64",
    )
    return replace(run, **changes)


def train(run: LayoutRun) -> dict[str, Any]:
    return launch_layout(run, lambda event: None)


@pytest.fixture
def losses_alone() -> Iterator[list[float]]:
    """Returns the losses of six steps in this process, computed with torch only."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    run = a_run("dp=1")
    task, losses = build_task(run), []
    optimizer = task.optimizer(list(task.model.parameters()))
    for step in range(6):
        inputs, targets = task.batch(run, step)
        optimizer.zero_grad()
        loss = task.loss(task.model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    yield losses
    torch.set_default_dtype(before)


def train_here(run: LayoutRun) -> dict[str, Any]:
    """Trains in this process as the only rank."""
    heard: list[Any] = []
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train_layout(run, heard.append)
    finally:
        dist.destroy_process_group()
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
    found: dict[str, Any] = heard[-1].result
    return found


@pytest.mark.usefixtures("forked_agent")
def test_a_run_continues_on_fewer_ranks(losses_alone: list[float], tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    parts = [
        train(a_run("dp=4", save=folder)),
        train(a_run("dp=2,zero=1", load=folder, save=folder, placement="table")),
        train_here(a_run("dp=1", load=folder)),
    ]
    losses = [loss for part in parts for loss in part["losses"]]
    assert losses == pytest.approx(losses_alone, rel=1e-12)
    assert {part["parameters"] for part in parts} == {CLICK_SHAPE.parameters}
    for part in parts[:2]:
        assert part["bytes_sent"] == part["predicted"]["bytes_sent"]
        assert part["memory"]["weights"] == part["predicted"]["memory"]["weights"]
    assert {table["kind"] for table in parts[0]["tables"]} == {
        "table",
        "row",
        "column",
        "replicated",
    }
    assert {table["kind"] for table in parts[1]["tables"]} == {"table"}
    assert "tables" not in parts[2]
