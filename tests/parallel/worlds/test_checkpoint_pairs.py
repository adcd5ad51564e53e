"""Checkpoints of four layouts of four ranks and of one process. Each layout reads all of them, and
its next two losses are those of one process without a checkpoint.
"""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from parallel.worlds.layout_training import expert_shape
from parallel.worlds.test_layout_checkpoint import a_run, losses_alone, train
from time_limits import limit_s
from worlds.forked import join_all, start_ranks
from worlds.torch_version import needs_layouts

pytestmark = pytest.mark.torch
ALONE = "dp=1"
LAYOUTS = ("dp=4,zero=3", "dp=2,tp=2,zero=3", "tp=2,pp=2", "dp=4,ep=4")
CHANGES = expert_shape(layers=2)
TOLERANCE = 1e-11
STEPS_BEFORE, STEPS_AFTER = 2, 2


def join(rank, ranks, folder):
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )


def save_all(runs, checkpoints):
    """Trains each layout, and saves it. Returns the losses by layout."""
    found = {}
    for text, run in runs.items():
        found[text] = train(run, STEPS_BEFORE)
        run.save(checkpoints / text)
    return found


def load_all(runs, checkpoints):
    """Continues each layout from each checkpoint. Returns the losses by layout and checkpoint."""
    found = {}
    for text, run in runs.items():
        for source in (ALONE, *LAYOUTS):
            run.load(checkpoints / source)
            assert run.steps == STEPS_BEFORE
            found[f"{source} read by {text}"] = train(run, STEPS_AFTER)
    return found


def work(rank, ranks, texts, tasks, checkpoints, folder):
    """Saves or loads, or both. Rank 0 writes the losses to a file."""
    join(rank, ranks, folder)
    runs = {text: a_run(text, **CHANGES) for text in texts}
    found = {}
    for task in tasks:
        found[task] = {"save": save_all, "load": load_all}[task](runs, checkpoints)
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def losses(ranks, texts, tasks, tmp_path):
    folder = tmp_path / f"{ranks} {' '.join(tasks)}"
    folder.mkdir()
    words = (ranks, texts, tasks, tmp_path / "checkpoints")
    processes = start_ranks(__file__, "work", ranks, *words, folder=folder)
    processes[0].join(limit_s(30))
    join_all(processes)
    path = folder / "losses.json"
    assert path.exists(), "\n".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
    return json.loads(path.read_text())


def test_each_layout_reads_each_checkpoint(tmp_path):
    needs_layouts(*LAYOUTS)
    found = [
        losses(1, (ALONE,), ("save",), tmp_path),
        losses(4, LAYOUTS, ("save", "load"), tmp_path),
        losses(1, (ALONE,), ("load",), tmp_path),
    ]
    try:
        expected = losses_alone(STEPS_BEFORE + STEPS_AFTER, **CHANGES)
    finally:
        torch.set_default_dtype(torch.float32)
    for each in found:
        for text, values in each.get("save", {}).items():
            assert values == pytest.approx(expected[:STEPS_BEFORE], rel=TOLERANCE), text
        for text, values in each.get("load", {}).items():
            assert values == pytest.approx(expected[STEPS_BEFORE:], rel=TOLERANCE), text
    assert sum(len(each.get("load", {})) for each in found) == (1 + len(LAYOUTS)) ** 2
