"""The interface of the exchanges that average gradients, and the exchange without compression."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from unisono.controller import Controller, Handle

TensorState = dict[str, dict[str, torch.Tensor]]
"""State of an exchange from one pass to the next: named tensors for each parameter name."""


class PendingAverage(ABC):
    """A pending average of one gradient. It may use the gradient's memory until `finish`."""

    def wait_first_round(self) -> None:  # noqa: B027
        """Waits for the first of two rounds. Exchanges with one round do nothing."""

    def begin_second_round(self) -> None:  # noqa: B027
        """Submits the second of two rounds. Exchanges with one round do nothing."""

    @abstractmethod
    def finish(self, *, used: bool) -> torch.Tensor:
        """Waits for the average, and returns it in the shape and type of the gradient.

        `used`: True if at least one rank used the parameter and no rank failed; equal on all ranks.
        If it is False, the caller drops the average, and the state of the exchange does not change.
        """


class GradientExchange(ABC):
    """Averages gradients over all ranks; each gradient has its parameter's name."""

    @abstractmethod
    def begin(self, name: str, grad: torch.Tensor) -> PendingAverage:
        """Submits this rank's gradient without waiting. All ranks must submit the same names."""

    @property
    def keeps_state(self) -> bool:
        """True if the averages of a backward pass depend on earlier backward passes."""
        return False

    def state(self) -> TensorState:
        """Returns the state by parameter name. Later backward passes do not change its tensors."""
        return {}

    def load_state(self, state: TensorState) -> None:  # noqa: B027
        """Replaces the state by one that `state` returned on this rank."""


class DenseExchange(GradientExchange):
    """Averages each gradient uncompressed, in place."""

    def __init__(self, controller: Controller, prefix: str = "") -> None:
        """The names of the tensors that the controller receives begin with `prefix`."""
        self._controller = controller
        self._prefix = prefix

    def begin(self, name: str, grad: torch.Tensor) -> PendingAverage:
        """Submits the gradient. The exchange writes the average into it."""
        handle = self._controller.all_reduce(self._prefix + name, grad, "avg")
        return _DenseAverage(grad, handle)


class _DenseAverage(PendingAverage):
    def __init__(self, grad: torch.Tensor, handle: Handle) -> None:
        self._grad = grad
        self._handle = handle

    def finish(self, *, used: bool) -> torch.Tensor:
        self._handle.wait()
        return self._grad


def average_all(
    exchange: GradientExchange, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the averages of all tensors, by name. May overwrite the tensors."""
    pending = {name: exchange.begin(name, tensor) for name, tensor in tensors.items()}
    finish_first_rounds(list(pending.values()))
    return {name: each.finish(used=True) for name, each in pending.items()}


def finish_first_rounds(pending: list[PendingAverage]) -> None:
    """Waits for the first rounds of all averages, then begins their second rounds.

    The second rounds begin together, so that the controller can fuse them.
    """
    for each in pending:
        each.wait_first_round()
    for each in pending:
        each.begin_second_round()
