"""The choice of a compression of gradients, and the state of its exchange in checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from unisono.controller import Controller
from unisono.parallel.data_parallelism.gradient_exchange import GradientExchange

STATE_KEY = "compression"
"""Key of the state in a `state_dict`."""


class Compression(ABC):
    """The base of the settings `Fp16`, `Bf16`, `PowerSGD`, `Int8` and `TopK`."""

    __slots__ = ()

    @abstractmethod
    def exchange(self, controller: Controller, prefix: str) -> GradientExchange:
        """Returns the exchange that compresses gradients."""


def require_compression(compression: object) -> None:
    """Raises `TypeError` unless `compression` is a compression setting or None."""
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(
            "compression: expected None, Fp16(), Bf16(), PowerSGD(), Int8() or TopK(), "
            f"got {compression!r}"
        )


def make_exchange(
    compression: Compression | None, controller: Controller, prefix: str = ""
) -> GradientExchange:
    """Returns the exchange for a compression.

    It submits tensors to the controller under names that begin with `prefix`.
    """
    if compression is None:
        return GradientExchange(controller, prefix)
    return compression.exchange(controller, prefix)


class CompressionState:
    """The state of a rank's gradient exchange, as part of a checkpoint of this rank.

    The state holds the exchange's tensors by parameter name. It also holds the rank and the number
    of ranks, so that a rank cannot load the compression error of another rank.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        compression: Compression | None,
        controller: Controller,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self.exists = exchange.keeps_state
        """True if the exchange keeps a state that checkpoints must contain."""
        self._exchange = exchange
        self._owner = {
            "kind": type(compression).__name__,
            "rank": controller.rank,
            "size": controller.size,
        }
        self._parameters = parameters

    def save(self) -> dict[str, Any]:
        """Returns the state as plain values and tensors, which later passes do not change."""
        return {**self._owner, "parameters": self._exchange.state()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores the state that `save` returned on this rank.

        The order of the model's parameters may have changed since.

        Raises `ValueError` for the state of another rank, number of ranks, compression or model.
        """
        for what, expected in self._owner.items():
            if saved.get(what) != expected:
                raise ValueError(
                    f"compression state: expected that of {what} {expected!r}, got "
                    f"{saved.get(what)!r}; every rank saves and loads a state of its own. To begin "
                    f"without one, remove {STATE_KEY!r} from the checkpoint"
                )
        for name, tensors in saved["parameters"].items():
            self._require_fits(name, tensors)
        self._exchange.load_state(saved["parameters"])

    def _require_fits(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        parameter = self._parameters.get(name)
        if parameter is None:
            raise ValueError(
                f"compression state: the model has no parameter {name!r}; expected names of "
                f"{', '.join(map(repr, list(self._parameters)[:5]))}, ..."
            )
        error = tensors.get("error")
        if error is not None and error.shape != parameter.shape:
            raise ValueError(
                f"compression state of {name!r}: expected the shape {tuple(parameter.shape)}, got "
                f"{tuple(error.shape)}; load the checkpoint of this model"
            )
