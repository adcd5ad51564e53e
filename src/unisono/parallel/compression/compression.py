"""The gradient exchange for a compression setting, and the exchange's state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unisono.controller import Controller
from unisono.parallel.compression.error_feedback_exchange import GatheredExchange
from unisono.parallel.compression.int8_codec import Int8
from unisono.parallel.compression.narrow_float_exchange import Bf16, Fp16, NarrowFloatExchange
from unisono.parallel.compression.power_sgd import PowerSGD, PowerSGDExchange
from unisono.parallel.compression.top_k_codec import TopK
from unisono.parallel.data_parallelism.gradient_exchange import GradientExchange

Compression = Fp16 | Bf16 | PowerSGD | Int8 | TopK

STATE_KEY = "compression"
"""Key of the state in a `state_dict`."""


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
    match compression:
        case None:
            return GradientExchange(controller, prefix)
        case Fp16():
            return NarrowFloatExchange(controller, prefix, torch.float16)
        case Bf16():
            return NarrowFloatExchange(controller, prefix, torch.bfloat16)
        case PowerSGD():
            return PowerSGDExchange(controller, prefix, compression)
        case Int8() | TopK():
            return GatheredExchange(controller, prefix, compression)


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
