"""The task of the programs of this folder: a network on the handwritten digits of scikit-learn."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TextIO

import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

STEPS = 60
BATCH = 16
"""Images of a rank in a step."""


def digits() -> TensorDataset:
    """Returns the images, as 64 numbers from 0 to 1, and their classes."""
    images, classes = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(classes))


def network() -> nn.Module:
    """Returns a network of 1.1 million parameters with the same weights on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


class Record:
    """The losses and the end times of a rank's steps. Rank 0 prints them as one line."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._ends = [time.perf_counter()]

    def step(self, loss: float) -> None:
        """Records the end of a step."""
        self.losses.append(float(loss))
        self._ends.append(time.perf_counter())

    def report(self, file: TextIO | None = None) -> None:
        """Prints the mean loss of all ranks at each step, and this rank's step times."""
        losses: list[Sequence[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(losses, self.losses)
        if dist.get_rank() == 0:
            means = [sum(each) / len(each) for each in zip(*losses, strict=True)]
            times = [end - begin for begin, end in zip(self._ends, self._ends[1:], strict=False)]
            served_by = type(dist.group.WORLD).__module__.split(".")[0]
            found = {"served_by": served_by, "named": dist.get_backend(), "losses": means}
            print("RESULT " + json.dumps({**found, "step_s": times}), file=file, flush=True)
