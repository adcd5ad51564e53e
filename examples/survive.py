"""A training loop that loses a rank and goes on: same batches, same loss curve.

Covers: `PeerLostError`, `Communicator.shrink`, `former_ranks`, all_reduce of torch tensors.
Scenario: four ranks learn hand-written digits; one kills itself in the middle of a step. The
others shrink the communicator, go back to the last step that all of them have, share out the same
batches among three, and end where an undisturbed run ends.

    python examples/survive.py
"""

import copy
import multiprocessing
import os
import signal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import unisono

RANKS, STEPS, GLOBAL_BATCH = 4, 60, 96
LOST_RANK, LOST_IN_STEP = 2, 25


def batch_of(step, images):
    """The samples of a step: the same whoever shares them."""
    return np.random.default_rng(step).choice(len(images), GLOBAL_BATCH, replace=False)


class Training:
    """A model with its optimizer, at some step; every rank has the same."""

    def __init__(self):
        torch.manual_seed(1234)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.losses = []

    def state(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.losses))

    def restore(self, state):
        model, optimizer, losses = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.losses = losses

    def step(self, comm, images, labels, dies):
        # This rank's shard of the batch; the sums over all shards are those of the whole batch.
        mine = batch_of(len(self.losses), images)[comm.rank :: comm.size]
        loss = functional.cross_entropy(self.model(images[mine]), labels[mine], reduction="sum")
        self.optimizer.zero_grad()
        (loss / GLOBAL_BATCH).backward()
        for number, parameter in enumerate(self.model.parameters()):
            if dies and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(parameter.grad)
        total = comm.all_reduce(loss.detach() / GLOBAL_BATCH)
        self.optimizer.step()
        self.losses.append(total.item())


def shrink(comm, step):
    """The survivors, and the last step that all of them have: they are one apart at most, for a
    rank may have finished the step in which another lost its peer."""
    while True:
        comm = comm.shrink()
        try:
            return comm, comm.all_gather(np.array([step])).min()
        except unisono.PeerLostError:
            continue  # one more


def train(rank, name, loses_one, results):
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target)
    comm = unisono.init(rank=rank, size=RANKS, rendezvous=name, timeout_s=30)
    training = Training()
    before = training.state()
    while len(training.losses) < STEPS:
        dies = loses_one and rank == LOST_RANK and len(training.losses) == LOST_IN_STEP
        try:
            last, before = before, training.state()
            training.step(comm, images, labels, dies)
        except unisono.PeerLostError as error:
            comm, step = shrink(comm, len(before[2]))
            training.restore(before if len(before[2]) == step else last)
            before = training.state()
            if comm.rank == 0:
                print(f"{error}: {comm.size} ranks go on from step {step}")
    if comm.rank == 0:
        results.put(training.losses)
    comm.close()


def run(loses_one):
    """The losses of a run, one a step. Ranks are forks, so that one may die and nobody ends all."""
    start = multiprocessing.get_context("fork")
    results = start.SimpleQueue()
    name = f"survive-{os.getpid()}-{loses_one}"
    ranks = [start.Process(target=train, args=(r, name, loses_one, results)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    losses = results.get()
    for process in ranks:
        process.join()
    lost = [rank for rank, process in enumerate(ranks) if process.exitcode == -signal.SIGKILL]
    assert lost == ([LOST_RANK] if loses_one else []), [process.exitcode for process in ranks]
    return losses


def bar(loss, most):
    return "█" * round(24 * loss / most) or "▏"


def main():
    whole, shrunk = run(loses_one=False), run(loses_one=True)
    table = Table(
        title=f"Loss of {RANKS} ranks, and of a run that loses one in step {LOST_IN_STEP}"
    )
    for name in ("step", "undisturbed", "", "loses a rank", "", "difference"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    for step in sorted({*range(0, STEPS, 6), LOST_IN_STEP, STEPS - 1}):
        one, other = whole[step], shrunk[step]
        table.add_row(
            f"{step}{' ☠' if step == LOST_IN_STEP else ''}",
            f"{one:.5f}", f"[cyan]{bar(one, whole[0])}",
            f"{other:.5f}", f"[magenta]{bar(other, whole[0])}", f"{abs(one - other):.0e}",
        )  # fmt: skip
    Console(width=110).print(table)
    furthest = max(abs(one - other) for one, other in zip(whole, shrunk, strict=True))
    print(f"The curves differ by {furthest:.0e} at most: the rounding of sums in another order.")
    assert whole[-1] < whole[0] / 5 and furthest < 1e-4


if __name__ == "__main__":
    main()
