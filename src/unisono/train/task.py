"""The interface between a task and the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.utils.data import TensorDataset

from unisono.train.digits_task import Digits
from unisono.train.settings import TaskName
from unisono.train.text_task import TextTask


class Task(Protocol):
    """A task: its data, model, loss and score. Equal on every rank."""

    @property
    def train_set(self) -> TensorDataset: ...

    def model(self) -> nn.Module: ...

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer: ...

    def loss(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the mean loss of a batch, for differentiation."""
        ...

    def score(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, float]:
        """Returns (sum, count) over this rank's share of unseen data; the score is their ratio."""
        ...

    def sample(self, model: nn.Module) -> str:
        """Returns an example of the model's output as text, which may be empty."""
        ...


def build(name: TaskName) -> Task:
    """Returns the task with the given name, with its data loaded."""
    return Digits.load() if name == "digits" else TextTask.load()
