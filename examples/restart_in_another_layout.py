"""Training that loses a rank, and continues from its last checkpoint on fewer ranks.

Covers: `unisono.run`, `parallelize`, `ParallelRun.save` and `load`, `PeerLostError`. Scenario: four
ranks train a transformer, with tensor and pipeline parallelism. One rank kills itself in the middle
of the training. The job starts again from the last checkpoint on two ranks, which divide the
samples and the optimizer's states. The losses are those of one process without a failure.
`elastic_training.py` trains by the same functions, with elastic ranks.

    python examples/restart_in_another_layout.py
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

import unisono
from unisono.parallel import CrossEntropy, Layout, TransformerModel, parallelize
from unisono.planner import Transformer

STEPS, STEPS_PER_SAVE, LOST_IN_STEP = 8, 2, 5
SHAPE = Transformer(layers=2, hidden=32, heads=4, vocab=64, positions=16)
LAYOUTS = (Layout(tp=2, pp=2), Layout(dp=2, zero=1))
"""The first layout, and the next after each failure."""


def batch_of(step):
    """Returns the batch of a step, which is the same in all layouts."""
    starts, strides = torch.arange(8)[:, None] * 7 + step, torch.tensor([1, 3])
    text = (starts + torch.arange(SHAPE.positions + 1) * strides[step % 2]) % SHAPE.vocab
    return text[:, :-1], text[:, 1:]


def train(layout, folder, lost_in_step=None, steps=STEPS):
    """Trains from the folder's last checkpoint or, without a checkpoint, from the beginning.
    Returns the losses by step. The last rank kills itself in the step `lost_in_step`.
    """
    dist.init_process_group("unisono")
    torch.set_default_dtype(torch.float64)
    run = parallelize(
        TransformerModel(SHAPE, seed=0),
        layout,
        loss=CrossEntropy(SHAPE.vocab),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        microbatches=2,
    )
    if (folder / "latest").exists():  # written when a checkpoint is complete
        run.load(folder)
    losses = {}
    while run.steps < steps:
        if run.steps == lost_in_step and dist.get_rank() == layout.devices - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step = run.steps
        losses[step] = float(run.step(*batch_of(step)))
        if run.steps % STEPS_PER_SAVE == 0:
            run.save(folder)
    return losses


def train_alone(steps=STEPS):
    """Returns the losses of training in this process without a layout, by step."""
    torch.set_default_dtype(torch.float64)
    model, loss, losses = TransformerModel(SHAPE, seed=0), CrossEntropy(SHAPE.vocab), {}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        inputs, targets = batch_of(step)
        optimizer.zero_grad()
        found = loss(model(inputs), targets)
        found.backward()
        optimizer.step()
        losses[step] = float(found.detach())
    return losses


def main():
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = LAYOUTS
        try:
            unisono.run(train, ranks=first.devices, args=(first, folder, LOST_IN_STEP))
        except unisono.PeerLostError as error:
            console.print(f"[red]{first.text()}: {error}", highlight=False)
        losses = unisono.run(train, ranks=second.devices, args=(second, folder))[0]
    alone = train_alone()
    table = Table("step", "one process", f"after the restart: {second.text()}")
    for step, loss in alone.items():
        table.add_row(str(step), f"{loss:.12f}", f"{losses[step]:.12f}" if step in losses else "")
    console.print(table)
    first_step = min(losses)
    assert first_step == LOST_IN_STEP // STEPS_PER_SAVE * STEPS_PER_SAVE
    assert all(abs(losses[step] / alone[step] - 1) < 1e-10 for step in losses)


if __name__ == "__main__":
    main()
