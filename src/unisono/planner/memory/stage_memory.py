"""The memory of each pipeline stage, by kind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import NamedTuple

from unisono.planner.inputs.divided_parameters import (
    DeviceParameters,
    layer_parameters,
    stage_parameters,
)
from unisono.planner.inputs.layer_division import stage_layers
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.lora import Lora
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import EAGER, MEGATRON_CORE, Workload
from unisono.planner.memory.activation_bytes import layer_activation_bytes
from unisono.planner.memory.zero_states import StateBytes, gradient_bytes, state_bytes

MEMORY_KINDS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "working layer",
    "logits",
    "exchange buffers",
    "fragmentation",
    "context and communicators",
)
_LOGIT_BYTES = {"torch-2023": 4, **dict.fromkeys(MEGATRON_CORE, 6)}
"""Bytes of a logit while the loss runs, by software. Megatron-Core: 16 bits, and float32 that
becomes the exponentials and the gradient in place (`cross_entropy.py` of megatron/core).
torch-2023: the logit and its gradient in 16 bits (fused loss of llm-foundry)."""
_UNFUSED_LOGIT_BYTES = 10
"""Bytes of a logit with other software: 16 bits, float32, and the gradient in float32."""
_LEAST_FRAGMENTATION = 1.03
"""Ratio of the reserved memory to the live tensors if memory is short: PyTorch's allocator returns
what it does not use, and rounds sizes up (`expandable_segments`)."""
_CONTEXT_BYTES = 0.5 * 2**30
"""Bytes of a CUDA context, its modules and its workspaces."""


class MemoryUse(NamedTuple):
    """Bytes of the fullest device."""

    live: float
    """The largest sum of all live tensors."""
    needed: float
    """The live tensors, with the least overhead of the allocator, and what others than tensors
    need. A layout fits if a device has this memory."""
    reserved: float
    """The same with the usual overhead of the allocator, which gives memory back before it fails:
    at most the capacity, unless more is needed."""


class MemoryModel:
    """Computes the memory of stages of one model and workload.

    `fragmentation` is the ratio of the memory that the allocator reserves to the live tensors.
    `communicator_bytes` are the buffers of a communicator.
    """

    def __init__(
        self,
        model: Transformer,
        workload: Workload,
        *,
        fragmentation: float,
        communicator_bytes: float = 0.0,
        capacity_bytes: float = inf,
    ) -> None:
        self._model, self._workload = model, workload
        self._fragmentation, self._capacity_bytes = fragmentation, capacity_bytes
        self._communicator_bytes = communicator_bytes
        self._least = min(_LEAST_FRAGMENTATION, fragmentation)
        self._layers: dict[tuple[object, ...], float] = {}
        self._known_states: dict[tuple[int, ...], StateBytes] = {}

    def stages(
        self, layout: Layout, micro_batch: int, recompute: str
    ) -> tuple[dict[str, float], ...]:
        """Returns the bytes of a device of each stage, by kind."""
        return tuple(
            self.stage(layout, micro_batch, recompute, stage) for stage in range(layout.pp)
        )

    def use(self, layout: Layout, micro_batch: int, recompute: str) -> MemoryUse:
        """Returns the bytes of the fullest device."""
        return self._use(max(self._live_bytes(layout, micro_batch, recompute)), layout)

    def fullest_bytes(self, layout: Layout, micro_batch: int, recompute: str) -> float:
        """Returns the bytes that are reserved on the fullest device."""
        return self.use(layout, micro_batch, recompute).reserved

    def fits(self, layout: Layout, micro_batch: int, recompute: str, headroom: float = 0.0) -> bool:
        """Returns True if the fullest device leaves this share of the capacity free."""
        usable = self._capacity_bytes * (1 - headroom)
        room = (usable - self._outside_bytes(layout)) / self._least
        return all(live <= room for live in self._live_bytes(layout, micro_batch, recompute))

    def _use(self, live: float, layout: Layout) -> MemoryUse:
        outside = self._outside_bytes(layout)
        needed = live * self._least + outside
        usual = live * self._fragmentation + outside
        return MemoryUse(live, needed, min(usual, max(self._capacity_bytes, needed)))

    def _outside_bytes(self, layout: Layout) -> float:
        """Returns the bytes of the CUDA context, and of a communicator for all devices and for each
        axis of the layout.
        """
        axes = (layout.dp > 1) + (layout.tp > 1) + (layout.pp > 1) + (layout.cp > 1)
        communicators = axes + (layout.ep > 1) + (axes > 0)
        return _CONTEXT_BYTES + communicators * self._communicator_bytes

    def _live_bytes(self, layout: Layout, micro_batch: int, recompute: str) -> Iterator[float]:
        """Yields the live bytes of the stages that may need the most memory."""
        # Later stages keep fewer microbatches. So among stages with equally many layers, only the
        # first may need the most memory, or the last stage of the model, which keeps the logits.
        last = layout.pp - 1
        stages = stage_layers(self._model.layers, layout.pp, layout.chunks)
        layer, working = self._layers_bytes(layout, micro_batch, recompute)
        buffers = self._buffers(layout, micro_batch)
        for stage in dict.fromkeys((0, last, min(1, last), stages.index(max(stages)))):
            more = self._kept(layout, micro_batch, stage, layer) + working + buffers
            if stage == last:
                more += self._logits(layout, micro_batch)
            yield sum(self._states(layout, stage)) + more

    def stage(
        self, layout: Layout, micro_batch: int, recompute: str, stage: int
    ) -> dict[str, float]:
        """Returns the bytes of a device of one stage, by kind."""
        states = self._states(layout, stage)
        found: dict[str, float] = dict(zip(StateBytes._fields, states, strict=True))
        layer, working = self._layers_bytes(layout, micro_batch, recompute)
        found["activations"] = self._kept(layout, micro_batch, stage, layer)
        found["working layer"] = working
        last = stage == layout.pp - 1
        found["logits"] = self._logits(layout, micro_batch) if last else 0.0
        found["exchange buffers"] = self._buffers(layout, micro_batch)
        live, outside = sum(found.values()), self._outside_bytes(layout)
        found["fragmentation"] = self._use(live, layout).reserved - live - outside
        found["context and communicators"] = outside
        return found

    def _software(self, layout: Layout) -> str:
        return self._workload.software_of(layout)

    def _logits(self, layout: Layout, micro_batch: int) -> float:
        tokens = micro_batch * self._workload.seq / layout.cp
        software = self._software(layout)
        nbytes = _LOGIT_BYTES.get(software, _UNFUSED_LOGIT_BYTES)
        heads = 1 + self._model.mtp_layers
        return heads * tokens * self._model.vocab / layout.tp * nbytes

    def stage_parameters(self, layout: Layout, stage: int) -> DeviceParameters:
        """Returns the parameters of a device of a stage, before ZeRO."""
        model = self._model
        stages = stage_layers(model.layers, layout.pp, layout.chunks)
        before = sum(stages[:stage])
        dense = model.dense_among(before + stages[stage]) - model.dense_among(before)
        last = stage == layout.pp - 1
        return stage_parameters(model, layout, stages[stage], dense, first=stage == 0, last=last)

    def _states(self, layout: Layout, stage: int) -> StateBytes:
        key = (layout.tp, layout.pp, layout.chunks, layout.ep, layout.zero, layout.dp, layout.cp)
        found = self._known_states.get((*key, layout.dp_replicate, stage))
        if found is None:
            found = self._new_states(layout, stage)
            if self._workload.offload:
                found = found._replace(optimizer=0.0)
            self._known_states[*key, layout.dp_replicate, stage] = found
        return found

    def host_bytes(self, layout: Layout) -> float:
        """Returns the bytes of the optimizer states of a device that its host holds."""
        if not self._workload.offload:
            return 0.0
        return max(self._new_states(layout, stage).optimizer for stage in range(layout.pp))

    def _new_states(self, layout: Layout, stage: int) -> StateBytes:
        dense, routed = self.stage_parameters(layout, stage)
        lora = self._workload.lora
        if lora is not None:
            return self._lora_states(lora, layout, stage, dense + routed)
        shards = layout.dp * layout.cp // layout.dp_replicate
        precision = self._workload.precision
        narrow = self._workload.states == "bf16"
        states = partial(
            state_bytes,
            zero=layout.microbatch_zero,
            precision=precision,
            gradient_bytes=gradient_bytes(self._workload, layout),
            narrow=narrow,
        )
        found = states(dense, shards=shards)
        if routed:
            expert_shards = max(shards * layout.tp // layout.ep, 1) if layout.ep > 1 else shards
            more = states(routed, shards=expert_shards)
            found = StateBytes(*(a + b for a, b in zip(found, more, strict=True)))
        if layout.microbatch_zero == 3 and not narrow and precision not in ("fp32", "tf32"):
            # FSDP keeps float32 shards as the weights; the optimizer has the two moments.
            return StateBytes(found.weights * 2, found.gradients, found.optimizer * 2 / 3)
        return found

    def _lora_states(self, lora: Lora, layout: Layout, stage: int, frozen: float) -> StateBytes:
        """Returns the bytes of frozen weights, and of all states of the adapters."""
        shards = layout.dp * layout.cp // layout.dp_replicate
        precision = self._workload.precision
        layers = stage_layers(self._model.layers, layout.pp, layout.chunks)[stage]
        found = state_bytes(
            layers * lora.layer_parameters(self._model, layout.tp),
            zero=layout.microbatch_zero,
            shards=shards,
            precision=precision,
            gradient_bytes=gradient_bytes(self._workload, layout),
            narrow=self._workload.states == "bf16",
        )
        width = 4 if precision in ("fp32", "tf32") else 2
        kept = width * frozen / (shards if layout.microbatch_zero == 3 else 1)
        return StateBytes(found.weights + kept, found.gradients, found.optimizer)

    def _layers_bytes(
        self, layout: Layout, micro_batch: int, recompute: str
    ) -> tuple[float, float]:
        """Returns the bytes that a layer keeps until backward, and the extra bytes of the current
        layer.
        """
        experts = self._model.moe_layers > 0
        layer = self._layer(layout, micro_batch, recompute, experts)
        if recompute == "none":
            return layer, 0.0
        return layer, max(self._layer(layout, micro_batch, "none", experts) - layer, 0.0)

    def _kept(self, layout: Layout, micro_batch: int, stage: int, layer: float) -> float:
        """Returns the bytes of a stage that are kept until backward."""
        stages = stage_layers(self._model.layers, layout.pp, layout.chunks)
        microbatches = -(-self._workload.global_batch // (layout.dp * micro_batch))
        held = layout.rules.kept(layout.pipeline_size(microbatches), stage) / layout.chunks
        kept = held * stages[stage] * layer
        if stage == layout.pp - 1:
            kept += self._model.mtp_layers * layer
        if stage == 0 and self._software(layout) in EAGER:
            stream = micro_batch * self._workload.seq * self._model.hidden / layout.cp
            kept += held * stream / (layout.tp if layout.sequence_parallel else 1)
        return kept

    def _layer(self, layout: Layout, micro_batch: int, recompute: str, experts: bool) -> float:
        software = self._software(layout)
        key = (
            software,
            layout.tp,
            layout.cp,
            layout.ep,
            layout.sequence_parallel,
            micro_batch,
            recompute,
            experts,
        )
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = layer_activation_bytes(
                self._model,
                seq=self._workload.seq,
                batch=micro_batch,
                tp=layout.tp,
                cp=layout.cp,
                ep=layout.ep,
                sequence_parallel=layout.sequence_parallel,
                recompute=recompute,
                software=software,
                precision=self._workload.precision,
                experts=experts,
            )
        return found

    def _buffers(self, layout: Layout, micro_batch: int) -> float:
        """Returns the bytes of the buffers for gathered parameters with ZeRO-3, without pipeline,
        and for keys and values that context parallelism gathers.

        The buffers hold, in 16 bits, the weights of two layers, the gradients of one layer, and one
        matrix of the size of the embedding.
        """
        model, keys = self._model, 0.0
        if layout.cp > 1 and self._workload.context == "allgather":
            width = model.key_value_width / min(layout.tp, model.kv_heads)
            keys = 2 * micro_batch * self._workload.seq * width
        if layout.microbatch_zero < 3:
            return keys
        layer = sum(layer_parameters(model, layout, experts=model.moe_layers > 0))
        outer = model.vocab * model.hidden / layout.tp
        return keys + 2 * 2 * layer + 2 * layer + 2 * outer
