"""Processes that end while they save checkpoints: by SIGKILL at any moment, or by themselves."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from parallel.worlds.loaded_blocks import load_blocks
from unisono.errors import PeerLostError
from unisono.parallel import Layout, parallelize
from unisono.parallel.checkpoint import TensorBlock, block_checkpoint
from worlds.forked import join_all, start_ranks

pytestmark = pytest.mark.torch
RANKS = 2
ROWS = 4000


def a_run(rank: int, folder: Path):
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    model = torch.nn.Linear(1, ROWS, bias=False)
    torch.nn.init.zeros_(model.weight)
    return parallelize(
        model,
        Layout(dp=RANKS, zero=1),
        loss=torch.nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1.0),
    )


def save_forever(rank: int, name: str, keep: int, folder: Path) -> None:
    """Saves after each step, whose number all weights have."""
    run = a_run(rank, folder)
    weight = run.sets[0].held[0].values
    for number in itertools.count(1):
        with torch.no_grad():
            weight.fill_(number)
        getattr(run, name)(folder / "saved", {"number": number}, keep=keep)


@pytest.mark.parametrize(("name", "keep"), [("save", 1), ("async_save", 1), ("async_save", 2)])
def test_a_complete_checkpoint_stays_if_a_rank_is_killed_at_any_moment(name, keep, tmp_path):
    draw = random.Random(name)
    for turn in range(4):
        folder = tmp_path / str(turn)
        folder.mkdir()
        ranks = start_ranks(__file__, "save_forever", RANKS, name, keep, folder=folder)
        deadline = time.monotonic() + 60
        while not (folder / "saved" / "checkpoint-2").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        for each in draw.sample(ranks, RANKS):  # one rank first, so that the other one notices
            each.kill()
        join_all(ranks)
        values = torch.zeros(ROWS, 1)
        whole = TensorBlock(name="weight", shape=(ROWS, 1), start=(0, 0), values=values)
        facts = load_blocks(folder / "saved", [whole])
        assert facts["values"] == {"number": "all"}
        assert values.unique().numel() == 1 and values[0] >= 2
        complete = 0
        for path in (folder / "saved").glob("checkpoint-*"):
            try:
                load_blocks(path, [whole])
            except ValueError:
                continue
            complete += 1
        assert complete >= 1


def save_and_end(rank: int, fails: bool, folder: Path) -> None:
    run = a_run(rank, folder)
    before = block_checkpoint._SavePlanner.resolve_data

    def resolve(planner, item):
        time.sleep(0.3)
        if fails:
            raise OSError("the disk has failed")
        return before(planner, item)

    block_checkpoint._SavePlanner.resolve_data = resolve
    run.async_save(folder / "saved")
    assert not (folder / "saved" / "latest").exists()
    print("the program has ended", flush=True)
    sys.exit(0)


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_program_waits_for_a_save_and_prints_its_error(fails, tmp_path):
    join_all(start_ranks(__file__, "save_and_end", RANKS, fails, folder=tmp_path))
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(RANKS)]
    assert (tmp_path / "saved" / "latest").exists() is not fails, logs
    for log in logs:
        assert "the program has ended" in log
        said = [line for line in log.splitlines() if line.startswith("unisono: the asynchronous")]
        assert len(said) == fails, log
        assert all("failed: OSError: rank" in line for line in said)


def lose_a_rank(rank: int, name: str, folder: Path) -> None:
    """Kills rank 1 while its thread writes, and calls a method of the run on rank 0."""
    run = a_run(rank, folder)
    run.save(folder / "saved")
    if rank == 1:
        block_checkpoint.write_blocks = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    run.async_save(folder / "saved").join()
    batch = torch.ones(2, 1), torch.ones(2, ROWS)
    arguments = batch if name == "step" else (folder / "saved",)
    try:
        getattr(run, name)(*arguments)
    except PeerLostError as error:
        print("raised:", error, flush=True)
    sys.exit(0)


@pytest.mark.parametrize("name", ["step", "save", "load"])
def test_a_rank_that_dies_while_its_thread_writes_is_named(name, tmp_path):
    join_all(start_ranks(__file__, "lose_a_rank", RANKS, name, folder=tmp_path))
    log = (tmp_path / "0.log").read_text()
    assert "unisono: the asynchronous save to" in log
    (raised,) = [line for line in log.splitlines() if line.startswith("raised:")]
    assert "rank 1" in raised
    assert (tmp_path / "saved" / "latest").read_text() == "checkpoint-0"
