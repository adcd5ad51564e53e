"""Training under torchrun that loses a rank, and goes on from its newest complete checkpoint.

Covers: `torchrun --max-restarts`, `parallelize` with a layout of as many ranks as there are,
`ParallelRun.save` and `load`. Scenario: ranks train a transformer, and the last one kills itself.
torchrun starts all ranks again. They continue from the newest checkpoint, also if there are fewer
or more of them, as after the loss of a node. The losses are those of one process.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/elastic_training.py
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint node0:29500 examples/elastic_training.py --folder /shared/checkpoints
"""

import argparse
import os
import shutil
import signal
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist

from unisono.parallel import CrossEntropy, Layout, TransformerModel, parallelize
from unisono.planner import Transformer

STEPS_PER_SAVE = 2
SHAPE = Transformer(layers=2, hidden=32, heads=4, vocab=64, positions=16)


def batch_of(step):
    """Returns the batch of a step, which does not depend on the number of ranks."""
    starts, strides = torch.arange(8)[:, None] * 7 + step, torch.tensor([1, 3])
    text = (starts + torch.arange(SHAPE.positions + 1) * strides[step % 2]) % SHAPE.vocab
    return text[:, :-1], text[:, 1:]


def train(folder, steps, lost_in_step):
    """Trains from the newest complete checkpoint of the folder, if there is one. Returns the losses
    by step.
    """
    run = parallelize(
        TransformerModel(SHAPE, seed=0),
        Layout(dp=dist.get_world_size(), zero=1),
        loss=CrossEntropy(SHAPE.vocab),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    )
    if (folder / "latest").exists():  # written when a checkpoint is complete
        run.load(folder)
    losses = {}
    while run.steps < steps:
        if run.steps == lost_in_step and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step = run.steps
        losses[step] = float(run.step(*batch_of(step)))
        if run.steps % STEPS_PER_SAVE == 0:
            run.save(folder)
    return losses


def train_alone(steps):
    """Returns the losses of training in this process without a layout."""
    model, loss, losses = TransformerModel(SHAPE, seed=0), CrossEntropy(SHAPE.vocab), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        inputs, targets = batch_of(step)
        optimizer.zero_grad()
        found = loss(model(inputs), targets)
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="a folder that all nodes share")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lost-in-step", type=int, default=5, help="of the first start")
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    job, starts = os.environ["TORCHELASTIC_RUN_ID"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    folder = given.folder or Path(tempfile.gettempdir()) / f"checkpoints-{job}"
    dist.init_process_group("unisono")
    losses = train(folder, given.steps, given.lost_in_step if starts == "0" else None)
    if dist.get_rank() == 0:
        alone = train_alone(given.steps)
        for step, loss in losses.items():
            print(f"{dist.get_world_size()} ranks, step {step}: {loss:.12f}", flush=True)
            assert abs(loss / alone[step] - 1) < 1e-10
        if given.folder is None:
            shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
