"""The time of one training step of a layout, by kind."""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from typing import NamedTuple

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.divided_parameters import layer_parameters
from unisono.planner.inputs.host_offload import HostOffload
from unisono.planner.inputs.layer_division import StageKind, stage_kinds, stage_layers
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import (
    EAGER,
    HIDDEN_EXPERTS,
    LOW_PRECISIONS,
    MEGATRON_CORE,
    Workload,
)
from unisono.planner.step_times.exchange_times import ExchangeTimes, exchange_times
from unisono.planner.step_times.kernel_times import KernelTimes
from unisono.planner.step_times.layer_times import BACKWARD_ATTENTION, LayerModel, LayerTimes, Shape
from unisono.planner.step_times.parameter_groups import ParameterGroup, parameter_groups
from unisono.planner.step_times.update_times import ShardTimes, UpdateTimes

_LOSS_BYTES = 24
"""Bytes moved for each logit: softmax and its gradient in float32."""


class LayerStep(NamedTuple):
    """Seconds of a layer for one microbatch, forward and backward together, by kind."""

    matmul: float
    attention: float
    memory: float
    recompute: float
    tensor: float
    context: float
    expert: float
    shards: float
    host: float


class _StageLoad(NamedTuple):
    """Seconds of one microbatch on one stage (layers, host, output, messages, sums of gradients),
    and the number of equal stages.
    """

    stages: int
    layers: int
    layer: LayerStep
    host_s: float
    output_s: float
    send_s: float
    sums_s: float

    @property
    def seconds(self) -> float:
        """All seconds."""
        others_s = self.host_s + self.output_s + self.send_s + self.sums_s
        return self.layers * sum(self.layer) + others_s


_KnownSteps = dict[tuple[int, str], tuple[LayerStep, float]]
"""The seconds of a layer by kind and their sum, for each micro batch and recomputation."""


class StepModel:
    """Computes step times of layouts of one model on one cluster. Caches partial results."""

    def __init__(
        self,
        model: Transformer,
        cluster: Cluster,
        workload: Workload,
        constants: CalibratedConstants,
        exchanges: ExchangeTimes | None = None,
    ) -> None:
        self.model, self.cluster, self.workload = model, cluster, workload
        self.constants = constants
        self.kernels = KernelTimes(
            cluster.kind,
            constants,
            precision=workload.precision,
            frozen=workload.lora is not None,
        )
        self.exchanges = exchanges or exchange_times(cluster, constants)
        self.layers = LayerModel(
            model, self.kernels, self.exchanges, constants, workload.lora, workload.context
        )
        host = HostOffload.of(cluster) if workload.offload else None
        self._updates = UpdateTimes(model, workload, self.kernels, self.exchanges, constants, host)
        self._layer_times: dict[Shape, LayerTimes] = {}
        self._layer_steps: dict[tuple[object, ...], _KnownSteps] = {}
        self._unsharded: dict[tuple[object, ...], tuple[LayerStep, float]] = {}
        self._units: dict[tuple[object, ...], ShardTimes] = {}
        self._outputs: dict[tuple[int, float], float] = {}

    def with_constants(self, constants: CalibratedConstants) -> StepModel:
        """Returns the model of the same workload with other constants."""
        exchanges = self.exchanges.with_constants(constants)
        return StepModel(self.model, self.cluster, self.workload, constants, exchanges)

    def shape(self, layout: Layout, micro_batch: int, *, experts: bool) -> Shape:
        """Returns the sizes that determine the times of a layer."""
        # DeepSeek sends the inputs of experts in 8 bits (arXiv 2412.19437, section 3.3.3).
        narrow = layout.rules.hides_exchanges and self.workload.precision in LOW_PRECISIONS
        return Shape(
            micro_batch * self.workload.seq / layout.cp,
            micro_batch,
            self.workload.seq,
            layout.tp,
            layout.cp,
            layout.ep if experts else 1,
            layout.sequence_parallel,
            self._software(layout),
            experts,
            1 if narrow else 2,
        )

    def step(self, layout: Layout, micro_batch: int, recompute: str) -> dict[str, float]:
        """Returns the seconds of a step by kind; their sum is the step time."""
        stages = stage_layers(self.model.layers, layout.pp, layout.chunks)
        microbatches = self.workload.global_batch // (layout.dp * micro_batch) or 1
        sums_s = self._updates.sums_s(layout, stages, microbatches)
        loads = self._stage_loads(layout, micro_batch, recompute, stages, sums_s)
        whole_s, slowest_s, slowest = 0.0, -1.0, loads[0]
        for load in loads:
            load_s = load.seconds
            whole_s += load.stages * load_s
            if load_s > slowest_s:
                slowest_s, slowest = load_s, load
        kinds = {
            kind: microbatches * slowest.layers * seconds
            for kind, seconds in zip(LayerStep._fields, slowest.layer, strict=True)
        }
        kinds["host"] += microbatches * slowest.host_s
        kinds["shards"] += microbatches * self._outer_units_s(layout)
        kinds["output"] = microbatches * slowest.output_s
        kinds["send"] = microbatches * slowest.send_s + self._fill_sends_s(layout, micro_batch)
        kinds["sums"] = microbatches * slowest.sums_s
        again = 1.0 if recompute == "full" else 0.0
        share = layout.rules.bubble(layout.pipeline_size(microbatches), again)
        kinds["bubble"] = (whole_s - slowest_s) * share
        # With interleaving, the gradients of a group of layers are ready after its last pp
        # microbatches, so their exchange overlaps with the compute of the other groups of layers.
        behind = min(microbatches, layout.pp) if layout.chunks > 1 else 1
        kinds["gradients"] = self._updates.gradients_s(layout, stages, behind * slowest_s)
        kinds["optimizer"] = self._updates.optimizer_s(layout, stages)
        kinds["step"] = self._step_host_s(layout)
        spread = self.constants.straggler * sqrt(2 * log(layout.devices))
        kinds["straggler"] = spread * sum(kinds.values())
        return kinds

    def _step_host_s(self, layout: Layout) -> float:
        """Returns the host seconds of a step in addition to its microbatches. The host launches a
        step that is one CUDA graph at once.
        """
        if self._software(layout) == "megatron-2026":
            return 0.0
        return self.constants.eager_step_s if self._eager(layout) else self.constants.step_s

    def _stage_loads(
        self,
        layout: Layout,
        micro_batch: int,
        recompute: str,
        stages: tuple[int, ...],
        sums_s: float,
    ) -> list[_StageLoad]:
        """Returns the loads of a microbatch on each kind of stage."""
        output_s = self._output_s(layout, micro_batch * self.workload.seq / layout.cp)
        send_s = self._send_s(layout, micro_batch)
        host_s = self.constants.microbatch_s if self._eager(layout) else 0.0
        output_s += self._mtp_s(layout, micro_batch, recompute, output_s)
        found = []
        for kind, count in stage_kinds(self.model, stages):
            layer = self._mixed_layer(layout, micro_batch, recompute, kind)
            last_s = output_s if kind.last else 0.0
            found.append(_StageLoad(count, kind.layers, layer, host_s, last_s, send_s, sums_s))
        return found

    def _mtp_s(self, layout: Layout, micro_batch: int, recompute: str, output_s: float) -> float:
        """Returns the seconds of the MTP layers: a layer, a projection and an output for each."""
        model = self.model
        if not model.mtp_layers:
            return 0.0
        layer_s = self.layer_s(layout, experts=model.experts > 0)(micro_batch, recompute)
        tokens = micro_batch * self.workload.seq / layout.cp
        products_s = self.kernels.all_products_s(tokens, model.hidden / layout.tp, 2 * model.hidden)
        return model.mtp_layers * (layer_s + sum(products_s) + output_s)

    def _mixed_layer(
        self, layout: Layout, micro_batch: int, recompute: str, kind: StageKind
    ) -> LayerStep:
        """Returns the mean seconds of the layers of a stage, by kind."""
        if kind.dense in (0, kind.layers):
            return self.layer_step(layout, micro_batch, recompute, experts=kind.dense < kind.layers)
        dense = self.layer_step(layout, micro_batch, recompute, experts=False)
        routed = self.layer_step(layout, micro_batch, recompute, experts=True)
        share = kind.dense / kind.layers
        pairs = zip(dense, routed, strict=True)
        return LayerStep(*(share * d + (1 - share) * r for d, r in pairs))

    def _software(self, layout: Layout) -> str:
        return self.workload.software_of(layout)

    def _eager(self, layout: Layout) -> bool:
        return self._software(layout) in EAGER

    def layer_step(
        self, layout: Layout, micro_batch: int, recompute: str, *, experts: bool
    ) -> LayerStep:
        """Returns the seconds of one layer and microbatch by kind."""
        known = self._known_steps(layout, experts)
        return self._layer(known, layout, micro_batch, recompute, experts)[0]

    def layer_s(self, layout: Layout, *, experts: bool) -> Callable[[int, str], float]:
        """Returns a function of the micro batch and the recomputation that returns the seconds of
        one layer and microbatch.
        """
        known = self._known_steps(layout, experts)
        return lambda micro_batch, recompute: self._layer(
            known, layout, micro_batch, recompute, experts
        )[1]

    def layer_key(self, layout: Layout, *, experts: bool) -> tuple[object, ...]:
        """Returns the settings of a layout that determine the times of a layer."""
        zero = layout.microbatch_zero if layout.microbatch_zero >= 2 else 0
        return (
            layout.tp,
            layout.cp,
            layout.ep if experts else 1,
            layout.sequence_parallel,
            zero,
            (layout.dp, layout.dp_replicate) if zero else None,
            layout.rules.hides_exchanges,
            experts,
            self._software(layout),
        )

    def _known_steps(self, layout: Layout, experts: bool) -> _KnownSteps:
        return self._layer_steps.setdefault(self.layer_key(layout, experts=experts), {})

    def _layer(
        self, known: _KnownSteps, layout: Layout, micro_batch: int, recompute: str, experts: bool
    ) -> tuple[LayerStep, float]:
        """Returns the seconds of one layer and microbatch by kind, and their sum."""
        found = known.get((micro_batch, recompute))
        if found is None:
            shape = self.shape(layout, micro_batch, experts=experts)
            step = self._layer_step(shape, layout, recompute)
            found = known[micro_batch, recompute] = step, sum(step)
        return found

    def _layer_step(self, shape: Shape, layout: Layout, recompute: str) -> LayerStep:
        key = shape, layout.rules.hides_exchanges, recompute
        found = self._unsharded.get(key)
        if found is None:
            found = self._unsharded[key] = self._unsharded_step(shape, layout, recompute)
        step, device_s = found
        shards_s = self._shards_s(layout, shape, device_s)
        return step._replace(shards=shards_s) if shards_s else step

    def _unsharded_step(
        self, shape: Shape, layout: Layout, recompute: str
    ) -> tuple[LayerStep, float]:
        """Returns the seconds of one layer and microbatch without exchanges of ZeRO-2 and 3, and
        those that may hide these exchanges.
        """
        times = self._times(shape)
        again_s = times.recomputed_s(recompute, shape.software)
        unfused = shape.software in EAGER
        passes = 3 if recompute == "full" else 2
        tensor_s = self._tensor_exposed_s(shape, times, passes)
        # Only a ring sends its next block while attention computes.
        hidden = not unfused and self.workload.context == "ring"
        hidden_s = times.attention_s if hidden else 0.0
        beside_s = min(times.context_s, hidden_s)
        context_s = times.context_s - beside_s * (1 - self.constants.overlap_slowdown)
        context_s *= passes
        expert_s = self._expert_exposed_s(layout, times, passes * times.expert_s)
        attention_s = (3 if unfused else 1 + BACKWARD_ATTENTION) * times.attention_s
        memory_s = times.memory_s + times.memory_backward_s
        matmul_s = times.forward_s + times.backward_s - attention_s - memory_s
        device_s = matmul_s + attention_s + memory_s + again_s + tensor_s + context_s + expert_s
        host_s = passes * times.launches_s
        # In each forward pass, the host waits for the number of tokens of each expert.
        waiting_s = max(host_s - device_s, (passes - 1) * times.expert_wait_s, 0.0)
        found = LayerStep(
            matmul_s,
            attention_s,
            memory_s,
            again_s,
            tensor_s,
            context_s,
            expert_s,
            0.0,
            waiting_s,
        )
        if shape.software == "megatron-deepspeed":
            found = LayerStep(*(each / self.constants.deepspeed_share for each in found))
        return found, device_s + waiting_s

    def _times(self, shape: Shape) -> LayerTimes:
        found = self._layer_times.get(shape)
        if found is None:
            found = self._layer_times[shape] = self.layers.times(shape)
        return found

    def _expert_exposed_s(self, layout: Layout, times: LayerTimes, exchange_s: float) -> float:
        """Returns the seconds of a layer's expert exchanges, in all passes, that compute does not
        hide.

        DualPipeV and newer software compute one microbatch while they exchange another.
        """
        hidden = self._software(layout) in HIDDEN_EXPERTS or layout.rules.hides_exchanges
        if not hidden:
            return exchange_s
        beside_s = min(exchange_s, times.forward_s + times.backward_s)
        return exchange_s - beside_s * (1 - self.constants.overlap_slowdown)

    def _tensor_exposed_s(self, shape: Shape, times: LayerTimes, passes: int) -> float:
        """Returns the seconds of a layer's tensor-parallel exchanges that compute does not hide.

        megatron-2022 hides the exchanges of the backward pass behind the products of weight
        gradients, which are half of the backward products.
        """
        exchanges_s = passes * times.tensor_s
        if shape.software in MEGATRON_CORE and shape.sequence_parallel:
            return exchanges_s * self.constants.tensor_exposed
        if shape.software != "megatron-2022":
            return exchanges_s
        products_s = times.backward_s - 2 * times.attention_s - times.memory_backward_s
        beside_s = min(times.tensor_s, products_s / 2)
        return exchanges_s - beside_s * (1 - self.constants.overlap_slowdown)

    def _shards_s(self, layout: Layout, shape: Shape, device_s: float) -> float:
        """Returns the seconds of a layer's weight and gradient exchanges (ZeRO-2 and 3) that
        compute does not hide.
        """
        if layout.microbatch_zero < 2:
            return 0.0
        unit = self._unit(layout, experts=shape.experts)
        exchange_s = unit.gather_s * (2 if layout.zero == 3 else 1) + unit.scatter_s
        if self.kernels.frozen:  # Only weights are gathered, twice; adapters are small.
            exchange_s = unit.gather_s * (2 if layout.zero == 3 else 0)
        slowdown = self.constants.overlap_slowdown * unit.link_use
        return exchange_s - min(exchange_s, device_s) * (1 - slowdown)

    def _unit(self, layout: Layout, *, experts: bool) -> ShardTimes:
        """Returns the times of the exchanges of a layer's weights and gradients."""
        key = self.layer_key(layout, experts=experts)
        found = self._units.get(key)
        if found is None:
            parameters = layer_parameters(self.model, layout, experts=experts)
            groups = parameter_groups(parameters, layout)
            found = self._units[key] = self._updates.sharded(groups, layout)
        return found

    def _outer_units_s(self, layout: Layout) -> float:
        """Returns the seconds of a microbatch's exchanges of ZeRO-2 and 3 beside which nothing is
        computed: the gathers of the embedding, the output and the first layer, and the sums of
        their gradients after the backward pass.
        """
        if layout.microbatch_zero < 2:
            return 0.0
        model = self.model
        outer = ParameterGroup(
            model.vocab * model.hidden * (1 if model.tied else 2) / layout.tp,
            layout.dp * layout.cp,
            layout.tp,
        )
        first = self._unit(layout, experts=model.dense_layers < 1 and model.experts > 0)
        outer_s, first_s = (
            unit.gather_s if self.kernels.frozen else unit.gather_s + unit.scatter_s
            for unit in (self._updates.sharded((outer,), layout), first)
        )
        return outer_s + first_s * (1 - self.constants.overlap_slowdown * first.link_use)

    def _output_s(self, layout: Layout, tokens: float) -> float:
        """Returns the seconds of the output projection and the loss, forward and backward."""
        tp = layout.tp
        found = self._outputs.get((tp, tokens))
        if found is None:
            columns, h, kernels = self.model.vocab / tp, self.model.hidden, self.kernels
            found = kernels.wide_product_s(tokens, columns, h)
            found += kernels.wide_product_s(tokens, h, columns)
            if not kernels.frozen:
                found += kernels.wide_product_s(h, columns, tokens)
            found += tokens * columns * _LOSS_BYTES / kernels.memory_Bps
            self._outputs[tp, tokens] = found
        return found

    def _send_s(self, layout: Layout, micro_batch: int) -> float:
        """Returns the seconds that a microbatch's messages to the next and previous stage add to
        a step. Messages that compute hides slow it down.
        """
        if layout.pp == 1:
            return 0.0
        seconds = 2 * layout.chunks * self._message_s(layout, micro_batch)
        hidden = self.sends_behind_compute(layout)
        return seconds * (self.constants.overlap_slowdown if hidden else 1.0)

    def sends_behind_compute(self, layout: Layout) -> bool:
        """Returns True if compute hides the messages between stages: in interleaved schedules of
        software newer than megatron-2021.
        """
        return layout.chunks > 1 and not self._eager(layout)

    def _fill_sends_s(self, layout: Layout, micro_batch: int) -> float:
        """Returns the seconds of the messages that nothing hides while a pipeline fills and
        empties.
        """
        if layout.pp == 1 or not self.sends_behind_compute(layout):
            return 0.0
        return 2 * (layout.pp - 1) * self._message_s(layout, micro_batch)

    def _message_s(self, layout: Layout, micro_batch: int) -> float:
        """Returns the seconds of a message between two stages."""
        values = micro_batch * self.workload.seq / layout.cp * self.model.hidden
        # With Megatron-LM, each of the tp ranks sends 1 / tp of a message to the next stage, which
        # gathers the message inside its domain.
        nbytes = 2 * values / layout.tp
        stride = layout.tp * layout.cp * layout.dp
        return self.exchanges.send_s(nbytes, stride)
