"""Exchange that averages gradients as 16-bit floats, which have half as many bytes as float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.controller import Controller
from unisono.parallel.data_parallelism.compression_state import Compression
from unisono.parallel.data_parallelism.gradient_exchange import GradientExchange, Rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16(Compression):
    """Sends gradients as float16: 11 significant bits, magnitudes from 6e-8 to 65,504.

    Each rank divides by the number of ranks before it casts. So the sum is finite if every
    gradient is within float16's range, and often also if one is not.

    >>> Fp16()
    Fp16()
    """

    def exchange(self, controller: Controller, prefix: str) -> GradientExchange:
        """Returns an exchange in float16."""
        return NarrowFloatExchange(controller, prefix, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16(Compression):
    """Sends gradients as bfloat16: 8 significant bits, the range of float32.

    >>> Bf16()
    Bf16()
    """

    def exchange(self, controller: Controller, prefix: str) -> GradientExchange:
        """Returns an exchange in bfloat16."""
        return NarrowFloatExchange(controller, prefix, torch.bfloat16)


class NarrowFloatExchange(GradientExchange):
    """Averages float32 and float64 gradients in a 16-bit type, and gradients of other types
    uncompressed."""

    def __init__(self, controller: Controller, prefix: str, dtype: torch.dtype) -> None:
        super().__init__(controller, prefix)
        self._dtype = dtype

    def rounds(self, name: str, grad: torch.Tensor) -> Rounds:
        """Sums the gradients, divided by the number of ranks, in the narrow type."""
        if not grad.is_floating_point() or grad.dtype.itemsize <= self._dtype.itemsize:
            return (yield from super().rounds(name, grad))
        dtype = grad.dtype
        message = part_of_average(grad.detach(), self._controller.size, self._dtype)
        handle = self._controller.all_reduce(self._prefix + name, message, "sum")
        yield None
        average: torch.Tensor = handle.wait().to(dtype)
        return average


def part_of_average(grad: torch.Tensor, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns `grad / ranks` as `dtype`, rounded so that the sum over the ranks is finite.

    The sum is finite if each rank's gradient is within the range of `dtype`. Rounding to nearest
    does not ensure this: with 3 ranks, 65,504 / 3 becomes 21,840, and 3 x 21,840 is inf in float16.
    So the function replaces the smallest value whose multiple is too large by the largest value
    whose multiple is finite. Larger values come only from gradients beyond the range, and must
    still become infinities for a GradScaler to find.

    >>> part_of_average(torch.tensor([65504.0, 3.0]), 3, torch.float16).tolist()
    [21824.0, 1.0]
    """
    part = (grad / ranks).to(dtype)
    if ranks & (ranks - 1) == 0:
        return part  # division by a power of two is exact
    largest = torch.finfo(dtype).max
    limit = torch.tensor(largest / ranks, dtype=torch.float64).to(dtype)
    if float(limit) * ranks > largest:
        limit = torch.nextafter(limit, torch.zeros((), dtype=dtype))
    above = torch.nextafter(limit, torch.full((), torch.inf, dtype=dtype))
    return torch.where(part.abs() == above, torch.copysign(limit, part), part)
