"""What the training loop needs to know of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.utils.data import TensorDataset

from unisono.train.digits import Digits
from unisono.train.settings import TaskName
from unisono.train.text import TextTask


class Task(Protocol):
    """Data, model, loss and judgement. Every rank builds the same one."""

    @property
    def train_set(self) -> TensorDataset: ...

    def model(self) -> nn.Module: ...

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer: ...

    def loss(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Mean loss of a batch, to be differentiated."""
        ...

    def score(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, float]:
        """(sum, count) over this rank's share of unseen data; the score is their ratio."""
        ...

    def sample(self, model: nn.Module) -> str:
        """Something to read that shows what was learned; may be empty."""
        ...


def build(name: TaskName) -> Task:
    """The task of that name, with its data loaded."""
    return Digits.load() if name == "digits" else TextTask.load()
