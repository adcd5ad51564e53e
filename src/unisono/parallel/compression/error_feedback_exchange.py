"""Exchange of compressed gradients that cannot be summed: ranks gather and decode all messages."""

from __future__ import annotations

from abc import abstractmethod

import torch

from unisono.controller import Controller
from unisono.parallel.data_parallelism.compression_state import Compression
from unisono.parallel.data_parallelism.gradient_exchange import (
    GradientExchange,
    Rounds,
    TensorState,
)

_ERROR = "error"


class GradientCodec(Compression):
    """A lossy code for vectors of floats. Vectors of equal length have messages of equal size."""

    __slots__ = ()
    error_feedback: bool
    """True if what a message lacks is added to the next gradient."""

    def exchange(self, controller: Controller, prefix: str) -> GradientExchange:
        """Returns an exchange that gathers messages."""
        return GatheredExchange(controller, prefix, self)

    @abstractmethod
    def message_bytes(self, count: int, itemsize: int) -> int:
        """Returns the size of the message for `count` values of `itemsize` bytes each."""

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the message (uint8) for a contiguous vector of at least one value."""

    @abstractmethod
    def add_decoded(self, message: torch.Tensor, total: torch.Tensor) -> None:
        """Adds the decoded message to `total`, which has the type of the encoded vector."""


def working_dtype(grad: torch.Tensor) -> torch.dtype:
    """Returns the element type for computations with a gradient: at least float32."""
    return torch.promote_types(grad.dtype, torch.float32)


def all_finite(values: torch.Tensor) -> bool:
    """Returns True if no value is infinite or NaN. Needs at least one value."""
    # `isfinite` of each value would take one more pass over memory.
    return bool(torch.isfinite(values.abs().amax()))


class GatheredExchange(GradientExchange):
    """Averages gradients by an all_gather of messages, with error feedback.

    A rank's message is lossy. With error feedback, the rank adds what the message lacks to its next
    gradient of the same parameter, so that nothing is lost over time. Source: S. P. Karimireddy et
    al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.

    Each rank decodes and adds all messages in rank order, so all ranks have the same bits.
    """

    def __init__(self, controller: Controller, prefix: str, codec: GradientCodec) -> None:
        super().__init__(controller, prefix)
        self._codec = codec
        self._errors: dict[str, torch.Tensor] = {}

    def rounds(self, name: str, grad: torch.Tensor) -> Rounds:
        """Gathers the messages of the gradient plus the error that earlier messages left."""
        if not self.compresses(grad):
            return (yield from super().rounds(name, grad))
        values = grad.detach().to(working_dtype(grad))
        if name in self._errors:
            values = values + self._errors[name]
        values = values.reshape(-1)
        own = self._codec.encode(values)
        handle = self._controller.all_gather(self._prefix + name, own)
        used = yield None
        total = torch.zeros_like(values)
        for message in handle.wait().view(self._controller.size, -1):
            self._codec.add_decoded(message, total)
        total /= self._controller.size
        if used and self.keeps_state and all_finite(total):
            decoded = torch.zeros_like(values)
            self._codec.add_decoded(own, decoded)
            self._errors[name] = (values - decoded).view(grad.shape)
        return total.view(grad.shape).to(grad.dtype)

    def compresses(self, grad: torch.Tensor) -> bool:
        """Returns True if the messages have fewer bytes than an all_reduce of the gradient.

        With N ranks, a rank receives N - 1 messages. In an all_reduce it would receive 2 (N - 1) /
        N times the bytes of the gradient.
        """
        if not grad.is_floating_point() or grad.numel() == 0:
            return False
        message = self._codec.message_bytes(grad.numel(), working_dtype(grad).itemsize)
        return message * self._controller.size < 2 * grad.numel() * grad.dtype.itemsize

    @property
    def keeps_state(self) -> bool:
        """True with error feedback, which keeps errors from one backward pass to the next."""
        return self._codec.error_feedback

    def state(self) -> TensorState:
        """Returns the compression errors of this rank, by parameter name."""
        return {name: {_ERROR: error} for name, error in self._errors.items()}

    def load_state(self, state: TensorState) -> None:
        """Replaces the compression errors of this rank."""
        self._errors = {name: found[_ERROR].clone() for name, found in state.items()}
