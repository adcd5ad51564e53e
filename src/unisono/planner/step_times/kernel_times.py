"""Times of single kernels on one device: matrix products, attention, and kernels between them."""

from __future__ import annotations

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.devices import Device
from unisono.planner.inputs.workload import MEGATRON_CORE, TORCH_FSDP

_TILE = 128
_VALUE_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 0.5}


class KernelTimes:
    """Times of kernels of a device in one precision.

    A matrix product takes the longer of two times: that of its FLOPs at the efficient rate, and
    that of its bytes at the memory rate (the roofline of Williams, Waterman and Patterson, 2009).
    The efficient rate falls with the tiles of the last, incomplete wave, and with short inner
    dimensions.
    """

    def __init__(
        self,
        device: Device,
        constants: CalibratedConstants,
        *,
        precision: str,
        frozen: bool = False,
    ) -> None:
        """`frozen`: weights have no gradients, so backward computes only those of inputs."""
        self.frozen = frozen
        self.architecture = architecture = device.architecture
        self.peak = device.peak_of(precision)
        self.matrix_rate = self.peak * constants.matmul(architecture, precision) * device.clock
        wide = "bf16" if precision in ("fp8", "fp4") else precision
        self.wide_peak = device.peak_of(wide)
        self.wide_rate = self.wide_peak * constants.matmul(architecture, wide) * device.clock
        self._attention_rates = {
            software: self.wide_peak
            * constants.fused_attention(architecture, software)
            * device.clock
            for software in ("torch-2023", *TORCH_FSDP, *MEGATRON_CORE)
        }
        self.memory_Bps = device.memory_Bps * constants.memory_share
        self.value_bytes = _VALUE_BYTES[precision]
        self.wide_bytes = _VALUE_BYTES[wide]
        self._lost = constants.lost_tiles(architecture) * device.units * _TILE * _TILE
        self._inner = constants.inner_loss * (2 / self.value_bytes if self.value_bytes < 2 else 1)
        self._wide_inner = constants.inner_loss
        self.start_s = constants.kernel_start_s
        self._products: dict[tuple[float, ...], tuple[float, float]] = {}
        self.expert_share = constants.grouped_products(architecture, precision)

    def attention_rate(self, software: str) -> float:
        """Returns the FLOP/s of fused attention in the forward pass."""
        return self._attention_rates[software]

    def product_s(
        self, rows: float, columns: float, inner: float, count: float = 1, share: float = 1
    ) -> float:
        """Returns the time of `count` products of [rows, inner] and [inner, columns].

        `share` is the fraction of the usual rate that the products reach.
        """
        outputs = rows * columns * count
        flops_s = 2 * outputs * inner / (self.matrix_rate * share)
        flops_s *= (1 + self._lost / outputs) * (1 + self._inner / inner)
        moved = ((rows + columns) * inner * count + outputs) * self.value_bytes
        return max(flops_s, moved / self.memory_Bps) + self.start_s

    def wide_product_s(self, rows: float, columns: float, inner: float) -> float:
        """Returns the time of a product of the output projection, which uses at least 16 bits."""
        outputs = rows * columns
        flops_s = 2 * outputs * inner / self.wide_rate
        flops_s *= (1 + self._lost / outputs) * (1 + self._wide_inner / inner)
        moved = ((rows + columns) * inner + outputs) * self.wide_bytes
        return max(flops_s, moved / self.memory_Bps) + self.start_s

    def all_products_s(
        self, rows: float, columns: float, inner: float, count: float = 1, share: float = 1
    ) -> tuple[float, float]:
        """Returns the forward time of a matrix product, and the time of its two gradients, or of
        its input's gradient for frozen weights.
        """
        key = rows, columns, inner, count, share
        found = self._products.get(key)
        if found is None:
            forward_s = self.product_s(rows, columns, inner, count, share)
            backward_s = self.product_s(rows, inner, columns, count, share)
            if not self.frozen:
                backward_s += self.product_s(inner, columns, rows, count, share)
            found = self._products[key] = forward_s, backward_s
        return found
