"""A training loop that loses a rank and continues with the same batches and the same loss curve.

Covers: `PeerLostError`, `Communicator.shrink`, all_reduce of torch tensors. Scenario: four ranks
learn handwritten digits. One rank kills itself during a step. The others shrink the communicator,
return to the last step that all of them have, and divide the same batches among three ranks. Their
final loss equals that of a run without failures. The second run uses two hosts: this machine under
two names, connected by TCP. In this run, rank 0 is lost, which is the control server.

    python examples/survive.py
"""

import copy
import multiprocessing
import os
import signal
import socket

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import unisono

RANKS, STEPS, GLOBAL_BATCH = 4, 40, 96
LOST_IN_STEP = 15


def batch_of(step, images):
    """Returns the samples of a step, independent of the number of ranks."""
    return np.random.default_rng(step).choice(len(images), GLOBAL_BATCH, replace=False)


class Training:
    """A model, its optimizer and its losses after some steps. All ranks hold equal values."""

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
        # This rank's samples of the batch. Losses and gradients, summed over all ranks, are those
        # of the whole batch.
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
    """Returns a communicator of the surviving ranks, and the last step that all of them have.

    The ranks' last steps differ by one at most, because a rank may have finished the step in which
    another rank lost its peer.
    """
    while True:
        comm = comm.shrink()
        try:
            return comm, comm.all_gather(np.array([step])).min()
        except unisono.PeerLostError:
            continue  # another rank was lost during this shrink


def train(rank, training, digits, rendezvous, hosts, lost, results):
    torch.set_num_threads(1)
    os.environ["UNISONO_HOST_ID"] = f"host{rank * hosts // RANKS}"
    os.environ["UNISONO_INTERFACE"] = "=lo"
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target)
    comm = unisono.init(rank=rank, size=RANKS, rendezvous=rendezvous, timeout_s=30)
    assert len(comm.hosts) == hosts
    before = training.state()
    while len(training.losses) < STEPS:
        dies = rank == lost and len(training.losses) == LOST_IN_STEP
        try:
            last, before = before, training.state()
            training.step(comm, images, labels, dies)
        except unisono.PeerLostError as error:
            comm, step = shrink(comm, len(before[2]))
            training.restore(before if len(before[2]) == step else last)
            before = training.state()
            if comm.rank == 0:
                print(f"{error}: {comm.size} ranks continue from step {step}")
    if comm.rank == 0:
        results.put(training.losses)
    comm.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def run(training, digits, hosts=1, lost=None):
    """Returns the loss of each step. Ranks are forked, since a launcher would end all ranks after
    one death.
    """
    start = multiprocessing.get_context("fork")
    results = start.SimpleQueue()
    place = f"tcp://127.0.0.1:{free_port()}"
    ranks = [
        start.Process(target=train, args=(rank, training, digits, place, hosts, lost, results))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    losses = results.get()
    for process in ranks:
        process.join()
    gone = [rank for rank, process in enumerate(ranks) if process.exitcode == -signal.SIGKILL]
    assert gone == ([] if lost is None else [lost]), [process.exitcode for process in ranks]
    return losses


def bar(loss, most):
    return "█" * round(24 * loss / most) or "▏"


def main():
    # all runs begin with these, since each forked rank changes only its own copy
    at_first = Training(), load_digits()
    whole = run(*at_first)
    runs = {
        "loses rank 2": run(*at_first, lost=2),
        "2 hosts, loses rank 0": run(*at_first, hosts=2, lost=0),
    }
    table = Table(title=f"Loss with {RANKS} ranks, and with one rank lost in step {LOST_IN_STEP}")
    for name in (
        "step",
        "no failure",
        "",
        *(word for run in runs for word in (run, "diff")),
    ):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    for step in sorted({*range(0, STEPS, 6), LOST_IN_STEP, STEPS - 1}):
        one, others = whole[step], [losses[step] for losses in runs.values()]
        table.add_row(
            f"{step}{' ☠' if step == LOST_IN_STEP else ''}",
            f"{one:.5f}", f"[cyan]{bar(one, whole[0])}",
            *(text for other in others for text in (f"{other:.5f}", f"{abs(one - other):.0e}")),
        )  # fmt: skip
    Console(width=110).print(table)
    differ = [abs(a - b) for losses in runs.values() for a, b in zip(whole, losses, strict=True)]
    print(f"Largest difference: {max(differ):.0e}, from rounding in another order of sums.")
    assert whole[-1] < whole[0] / 5 and max(differ) < 1e-4


if __name__ == "__main__":
    main()
