"""Times of the gradient exchange and of the optimizer, which follow the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.divided_parameters import DeviceParameters, stage_parameters
from unisono.planner.inputs.host_offload import HostOffload
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import EAGER, SUMMING_PRODUCTS, Workload
from unisono.planner.memory.zero_states import gradient_bytes
from unisono.planner.step_times.exchange_times import ExchangeTimes
from unisono.planner.step_times.kernel_times import KernelTimes
from unisono.planner.step_times.parameter_groups import ParameterGroup, parameter_groups

_WEIGHT_BYTES = 2


class ShardTimes(NamedTuple):
    """Seconds of the exchanges of sharded parameters."""

    gather_s: float
    """To gather the weights."""
    scatter_s: float
    """To sum and divide the gradients, also between replicas of the shards."""
    link_use: float
    """Mean share of the rate of a device's links during these exchanges."""


class UpdateTimes:
    """Computes the times of exchanges of gradients and of the optimizer, once a step.

    `stages` has the number of layers of each pipeline stage. The largest stage determines the
    times.
    """

    def __init__(
        self,
        model: Transformer,
        workload: Workload,
        kernels: KernelTimes,
        exchanges: ExchangeTimes,
        constants: CalibratedConstants,
        host: HostOffload | None = None,
    ) -> None:
        """`host`: it holds the optimizer states, and updates them."""
        self._host = host
        self._model, self._workload = model, workload
        self._kernels, self._exchanges = kernels, exchanges
        self._constants = constants
        self._parameters: dict[tuple[object, ...], DeviceParameters] = {}

    def gradients_s(self, layout: Layout, stages: tuple[int, ...], window_s: float) -> float:
        """Returns the seconds of the exchange of gradients, and of weights with ZeRO-1 (in a
        pipeline also with ZeRO-2 and 3), that compute does not hide.

        `window_s` is the compute time that hides the exchange if the software overlaps both. The
        share of the last layer is not hidden. The hidden share slows the compute down.
        """
        shards, reduced = layout.dp * layout.cp, self.reduced_bytes(layout)
        moved = 2 * reduced if layout.zero == 0 else reduced + _WEIGHT_BYTES
        found = self._tied_s(layout)
        if layout.microbatch_zero >= 2 or shards == 1:
            return found
        dense, routed = self._stage_groups(layout, stages)
        exchanges, seconds, link_s = self._exchanges, 0.0, 0.0
        for group in (dense, routed) if routed.parameters else (dense,):
            place = exchanges.place(group.ranks, group.stride)
            group_s = exchanges.gather_s(moved * group.parameters, place)
            seconds += group_s
            link_s += group_s * exchanges.link_use(place)
        if self._eager(layout):
            return found + seconds
        overlapped_s = min(seconds * (1 - 1 / max(stages)), window_s)
        slowdown = self._constants.overlap_slowdown * link_s / (seconds or 1.0)
        return found + seconds - overlapped_s * (1 - slowdown)

    def sums_s(self, layout: Layout, stages: tuple[int, ...], microbatches: int) -> float:
        """Returns the mean seconds in which a microbatch's gradients are added to their sums.

        Megatron-LM of 2021 adds all of them (`param.main_grad.add_` of its data parallelism), and
        PyTorch all but those of the first microbatch. Since 2022, the products of Megatron-LM do it
        (github NVIDIA/Megatron-LM, commits 83b1e42f30 and, for fp16, 07916bf245).
        """
        software = self._workload.software_of(layout)
        if layout.microbatch_zero >= 2 or software in SUMMING_PRODUCTS or self._kernels.frozen:
            return 0.0
        parameters = sum(each.parameters for each in self._stage_groups(layout, stages))
        # The gradient is read, and its sum is read and written.
        nbytes = self._kernels.wide_bytes + 2 * self.reduced_bytes(layout)
        share = 1.0 if software in EAGER else 1 - 1 / microbatches
        return share * parameters * nbytes / self._kernels.memory_Bps

    def reduced_bytes(self, layout: Layout) -> int:
        """Returns the bytes of a parameter's gradient in the exchange."""
        return min(gradient_bytes(self._workload, layout), 4)

    def sharded(self, groups: Sequence[ParameterGroup], layout: Layout) -> ShardTimes:
        """Returns the seconds of the exchanges of ZeRO-2 and 3."""
        exchanges, gather_s, scatter_s, link_s = self._exchanges, 0.0, 0.0, 0.0
        for group in groups:
            shards = self._shards(group, layout)
            place = exchanges.place(shards, group.stride)
            nbytes = self.reduced_bytes(layout) * group.parameters
            gathered_s = exchanges.gather_s(_WEIGHT_BYTES * group.parameters, place)
            scattered_s = exchanges.gather_s(nbytes, place)
            link_s += (gathered_s + scattered_s) * exchanges.link_use(place)
            if layout.dp_replicate > 1:
                copies = exchanges.place(layout.dp_replicate, group.stride * shards)
                summed_s = exchanges.all_reduce_s(nbytes / shards, copies)
                scattered_s += summed_s
                link_s += summed_s * exchanges.link_use(copies)
            gather_s += gathered_s
            scatter_s += scattered_s
        return ShardTimes(gather_s, scatter_s, link_s / ((gather_s + scatter_s) or 1.0))

    @staticmethod
    def _shards(group: ParameterGroup, layout: Layout) -> int:
        """Returns the number of ranks that hold different shards of a group."""
        return max(group.ranks // layout.dp_replicate, 1)

    def _tied_s(self, layout: Layout) -> float:
        """Returns the seconds in which the first and the last stage sum the gradients of their two
        copies of a tied embedding.
        """
        if layout.pp == 1 or not self._model.tied or self._kernels.frozen:
            return 0.0
        nbytes = self.reduced_bytes(layout) * self._model.vocab * self._model.hidden / layout.tp
        stride = layout.tp * layout.cp * layout.dp * (layout.pp - 1)
        return self._exchanges.all_reduce_s(nbytes, self._exchanges.place(2, stride))

    def _stage_groups(
        self, layout: Layout, stages: tuple[int, ...]
    ) -> tuple[ParameterGroup, ParameterGroup]:
        """Returns the dense and the expert parameters of the largest stage on one device."""
        key = layout.tp, layout.ep, max(stages)
        found = self._parameters.get(key)
        if found is None:
            lora = self._workload.lora
            dense = 0 if self._model.moe_layers else max(stages)
            found = stage_parameters(
                self._model, layout, max(stages), dense, first=False, last=True
            )
            if lora is not None:
                adapters = max(stages) * lora.layer_parameters(self._model, layout.tp)
                found = DeviceParameters(adapters, 0.0)
            self._parameters[key] = found
        return parameter_groups(found, layout)

    def optimizer_s(self, layout: Layout, stages: tuple[int, ...]) -> float:
        """Returns the seconds of the optimizer."""
        updated = 0.0
        for each in self._stage_groups(layout, stages):
            shards = self._shards(each, layout) if layout.zero else 1
            updated += each.parameters / shards
        if self._host is not None:
            return self._host.seconds(updated)
        return updated * self._constants.optimizer_bytes / self._kernels.memory_Bps

    def _eager(self, layout: Layout) -> bool:
        return self._workload.software_of(layout) in EAGER
