"""Codec of vectors as 8-bit integers, with one scale for each run of consecutive values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from unisono.parallel.compression.error_feedback_exchange import GradientCodec

_SCALE_BYTES = 4
_LARGEST = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(GradientCodec):
    """Sends gradients as 8-bit integers: about a quarter of float32's bytes.

    Every rank gathers all messages. With fewer than 8 ranks these have fewer bytes than an
    all_reduce of the gradient. With 8 ranks or more, gradients are sent uncompressed.

    Each value is rounded to a multiple of its run's scale: the largest magnitude of the run,
    divided by 127. The rounding error of a value is at most half of the scale. A run with an
    infinity or a NaN decodes to infinities and NaNs.

    >>> codec, values = Int8(values_per_scale=256), torch.tensor([1.0, -0.5, 0.0])
    >>> message, decoded = codec.encode(values), torch.zeros(3)
    >>> codec.add_decoded(message, decoded)
    >>> message.numel(), bool((decoded - values).abs().max() <= 0.5 / 127)
    (7, True)
    """

    values_per_scale: int = 256
    """Number of consecutive values that share one scale, a float32."""
    error_feedback: bool = True
    """True if the rounding error is added to the next gradient."""

    def __post_init__(self) -> None:
        if self.values_per_scale < 1:
            raise ValueError(
                f"values_per_scale: expected 1 or more values, got {self.values_per_scale}"
            )

    def message_bytes(self, count: int, itemsize: int) -> int:
        """Returns the size of a message: one byte for each value plus 4 bytes for each run."""
        return count + _SCALE_BYTES * self._runs(count)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the scales, then the 8-bit integers, as one message."""
        count = values.numel()
        rows = pad(values, (0, self._runs(count) * self.values_per_scale - count)).view(
            -1, self.values_per_scale
        )
        largest = rows.abs().amax(1)
        scales = (largest / _LARGEST).to(torch.float32)
        # A scale that was rounded down would be too small for the largest value of its run.
        infinity = torch.full((), torch.inf)
        scales = torch.where(scales * _LARGEST < largest, scales.nextafter(infinity), scales)
        safe = torch.where(scales == 0, 1.0, scales)
        integers = (rows / safe[:, None]).round_().to(torch.int8)
        return torch.cat([scales.view(torch.uint8), integers.view(-1)[:count].view(torch.uint8)])

    def add_decoded(self, message: torch.Tensor, total: torch.Tensor) -> None:
        """Adds the integers of the message, each times its scale, to `total`."""
        count = total.numel()
        head = _SCALE_BYTES * self._runs(count)
        scales = message[:head].clone().view(torch.float32).to(total.dtype)
        integers = message[head:].view(torch.int8)
        whole = count - count % self.values_per_scale
        rows = integers[:whole].view(-1, self.values_per_scale)
        total[:whole].view(-1, self.values_per_scale).add_(rows * scales[: len(rows), None])
        total[whole:].add_(integers[whole:] * scales[len(rows) :])

    def _runs(self, count: int) -> int:
        return -(-count // self.values_per_scale)
