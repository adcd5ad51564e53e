"""A rank that dies while a mixed layout trains, and a process that dies while it saves a
checkpoint.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from parallel.worlds.layout_training import (
    expert_shape,
    sgd,
    small_shape,
    token_batches,
    train_alone,
)
from parallel.worlds.loaded_blocks import load_blocks
from time_limits import limit_s
from unisono.errors import PeerLostError
from unisono.parallel import Layout
from unisono.parallel.checkpoint import TensorBlock, block_checkpoint, save_blocks
from unisono.parallel.layers import CrossEntropy, TransformerModel
from unisono.parallel.run import parallelize
from unisono.parallel.run.parameters import flat_sets
from unisono.parallel.run.parameters.gradient_sums import OverlappedSums
from worlds.forked import join_all, start, start_ranks
from worlds.torch_version import needs_layouts

pytestmark = pytest.mark.torch
RANKS, LOST, LAST_STEP = 4, 3, 2
DETECTION_S = 1.0
LENGTH = 100_000


def die(folder):
    (folder / "killed").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def shape_of(text):
    """Returns the shape of the model that a layout trains."""
    changes = expert_shape(layers=2, dense_layers=0) if "ep=" in text else {"tied": False}
    return small_shape(**{"layers": 2} | changes)


def a_run(rank, text, folder, *, overlap=None):
    """Joins the job, and divides a model by a layout."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    shape = shape_of(text)
    return parallelize(
        TransformerModel(shape),
        Layout.parse(text),
        loss=CrossEntropy(shape.vocab),
        optimizer=sgd,
        microbatches=2,
        overlap=overlap,
    )


def train_until_killed(rank, text, phase, folder):
    """Trains until the last rank kills itself in a phase of its third step."""
    flat_sets._BUCKET_BYTES = 500
    run = a_run(rank, text, folder, overlap=True if phase == "sums" else None)
    if rank == LOST:
        arm(run, phase, folder)
    inputs, targets = token_batches(shape_of(text))[0]
    try:
        for _ in itertools.count():
            run.step(inputs, targets)
    except Exception as error:
        said = [type(error).__name__, str(error), time.time(), run.steps]
        (folder / f"{rank}.json").write_text(json.dumps(said))


def arm(run, phase, folder):
    """Registers hooks that kill this process in the given phase of its last step.

    A phase such as "W1" ends a pass of the schedule: "F", "I", "W" or "B", and a microbatch.
    """

    def strike(*_):
        if run.steps == LAST_STEP:
            die(folder)

    stage = run.stages[0][1]
    if phase == "before":
        stage.register_forward_pre_hook(strike)
    elif phase == "forward":
        stage.register_forward_hook(strike)
    elif phase == "backward":

        def watch(module, arguments, output):
            if output.requires_grad:
                output.register_hook(strike)

        stage.register_forward_hook(watch)
    elif phase == "sums":
        submit = OverlappedSums._submit

        def submitted(sums, bucket):
            if len(sums._submitted) == 3:
                strike()
            submit(sums, bucket)

        OverlappedSums._submit = submitted
    elif phase == "optimizer":
        run.optimizer.register_step_pre_hook(strike)
    else:
        record = run.clock.record

        def watched(kind, microbatch, stage, begin_s):
            if f"{kind}{microbatch}" == phase:
                strike()
            record(kind, microbatch, stage, begin_s)

        run.clock.record = watched


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("tp=2,pp=2", "before"),  # torch wraps the error in an error of its own
        ("tp=2,pp=2", "forward"),
        ("dp=2,pp=2,schedule=zb1p", "backward"),
        ("dp=2,tp=2,zero=1", "optimizer"),
        ("dp=2,cp=2,zero=3", "backward"),
        ("dp=4", "sums"),
        ("dp=2,tp=2,zero=1", "sums"),
        ("tp=2,pp=2,schedule=gpipe", "F1"),
        ("dp=2,pp=2,ep=2", "B1"),
        ("dp=2,pp=2,vpp=2,schedule=zbv", "I0"),
        ("tp=2,pp=2,schedule=zb1p", "W1"),
    ],
)
def test_a_lost_rank_is_named_by_all_ranks(text, phase, tmp_path):
    needs_layouts(text)
    join_all(start_ranks(__file__, "train_until_killed", RANKS, text, phase, folder=tmp_path))
    killed = float((tmp_path / "killed").read_text())
    for rank in set(range(RANKS)) - {LOST}:
        name, told, ended, steps = json.loads((tmp_path / f"{rank}.json").read_text())
        assert name == PeerLostError.__name__, told
        assert f"rank {LOST}" in told
        assert ended - killed < limit_s(DETECTION_S)
        assert steps in (LAST_STEP, LAST_STEP + 1)  # the other ranks may have finished the step


def save_until_killed(rank, text, folder):
    """Saves a checkpoint after the first step. The last rank kills itself in the second save."""
    torch.set_default_dtype(torch.float64)
    run = a_run(rank, text, folder)
    for batch in token_batches(shape_of(text))[:2]:
        run.step(*batch)
        if rank == LOST and run.steps == 2:
            block_checkpoint._SavePlanner.lookup_object = lambda planner, index: die(folder)
        try:
            run.save(folder / "checkpoint")
        except Exception as error:
            (folder / f"{rank}.json").write_text(json.dumps([type(error).__name__, str(error)]))
            return


@pytest.mark.parametrize("text", ["tp=2,pp=2", "dp=2,tp=2,zero=3"])
def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before_it(text, tmp_path):
    needs_layouts(text)
    join_all(start_ranks(__file__, "save_until_killed", RANKS, text, folder=tmp_path))
    for rank in set(range(RANKS)) - {LOST}:
        name, told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert name == PeerLostError.__name__ and f"rank {LOST}" in told, told
    torch.set_default_dtype(torch.float64)
    try:
        whole = TransformerModel(shape_of(text))
        train_alone(whole, CrossEntropy(), token_batches(shape_of(text))[:1], None)
        blocks = [
            TensorBlock(
                name=name,
                shape=tuple(each.shape),
                start=(0,) * each.dim(),
                values=torch.zeros_like(each),
            )
            for name, each in whole.named_parameters()
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert load_blocks(tmp_path / "checkpoint", blocks)["steps"] == 1
    for each in blocks:
        torch.testing.assert_close(each.values, whole.get_parameter(each.name).detach())


def block(values):
    return [TensorBlock(name="weights", shape=(LENGTH,), start=(0,), values=values)]


def save_forever(folder):
    for step in itertools.count(1):
        save_blocks(folder, block(torch.full((LENGTH,), float(step))), extra={"steps": step})


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.9 uses it itself
def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path):
    """Tests that a process that is killed while it saves checkpoints leaves a complete one, after
    any of several delays.
    """
    for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.03):
        folder = tmp_path / f"{delay_s}"
        process = start(__file__, "save_forever", folder, log=tmp_path / "log")
        deadline = time.monotonic() + 60
        while not (folder / "latest").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay_s)
        process.kill()
        process.join()
        values = torch.zeros(LENGTH)
        steps = load_blocks(folder, block(values))["steps"]
        assert steps >= 1
        assert torch.equal(values, torch.full((LENGTH,), float(steps)))
        save_blocks(folder, block(values + 1), extra={"steps": steps + 1})
        assert load_blocks(folder, block(values))["steps"] == steps + 1
