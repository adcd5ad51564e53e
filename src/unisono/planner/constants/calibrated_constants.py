"""The physical constants of the time and memory model, and the runs that each was fitted to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from unisono.planner.data_files import data_text
from unisono.planner.inputs.workload import LOW_PRECISIONS, MEGATRON_CORE, TORCH_FSDP

_FALLBACK = {
    "volta": "ampere",
    "turing": "ampere",
    "ada": "ampere",
    "cdna2": "ampere",
    "davinci": "ampere",
    "cdna3": "hopper",
    "cpu": "ampere",
}


@dataclass(frozen=True, kw_only=True)
class CalibratedConstants:
    """Constants with a physical meaning. `data/constants.json` lists the runs behind each constant.

    >>> 0.3 < default_constants().matmul("ampere", "fp16") < 1
    True
    """

    efficiency: Mapping[str, float] = field(hash=False)
    """Share of the peak that large matrix products reach, by architecture and precision."""
    attention: Mapping[str, float] = field(hash=False)
    """Share of the 16-bit peak that fused attention reaches in the forward pass, by architecture
    and software."""
    tile_loss: Mapping[str, float] = field(hash=False)
    """Time that a matrix product loses in its last, incomplete wave, by architecture: the time of
    this many tiles of 128 x 128 outputs on each multiprocessor."""
    inner_loss: float
    """Inner dimension at which a matrix product reaches half of the rate that it has with a very
    long inner dimension."""
    kernel_start_s: float
    """Device seconds of a kernel in addition to its FLOPs and bytes: its start, and the gap to the
    next kernel."""
    memory_share: float
    """Share of the memory rate that kernels reach."""
    traffic: float
    """Ratio of the bytes that kernels between matrix products move to the bytes that perfectly
    fused kernels would move."""
    score_traffic: float
    """Bytes moved for each score of unfused attention in the forward pass."""
    eager_launch_s: float
    """Host seconds to launch a layer's forward pass with fp16 software of 2021 and 2022."""
    launch_s: float
    """Host seconds to launch a layer's forward pass with later software."""
    expert_launch_s: float
    """Host seconds to launch the forward pass of each expert of a device, in addition to
    `launch_s`."""
    pair_launch_s: float
    """Host seconds that each pair of ranks adds to a collective in a layer, with fp16 software of
    2021 and 2022, because the ranks launch the collective at different times and wait for each
    other."""
    eager_step_s: float
    """Host seconds of a step in addition to its microbatches, with fp16 software of 2021 and
    2022."""
    step_s: float
    """Host seconds of a step in addition to its microbatches, with later software."""
    dlrm_step_s: float
    """Host seconds of a step of a recommendation model."""
    deepspeed_share: float
    """Ratio of the speed of layers with Megatron-DeepSpeed to that with Megatron-LM of 2021."""
    microbatch_s: float
    """Host seconds of a microbatch in addition to its layers, with fp16 software of 2021 and
    2022."""
    link_share: float
    """Share of the rate inside a domain that collectives reach."""
    link_start_s: float
    """Start-up seconds of a collective inside a domain."""
    link_rank_s: float
    """Additional start-up seconds for each further rank inside a domain."""
    round_s: float
    """Seconds of a round of a ring inside a domain in addition to its bytes."""
    network_share: float
    """Share of the rate between domains that collectives reach."""
    network_start_s: float
    """Start-up seconds of a message between domains: a tree has one for each doubling of the number
    of domains, and a ring one for each domain."""
    exchange_share: float
    """Share of the rate between domains that an exchange of tokens between experts reaches."""
    tensor_exposed: float
    """Share of the time of tensor-parallel exchanges that compute does not hide, with software that
    overlaps the two."""
    overlap_slowdown: float
    """Fraction by which compute becomes slower while an exchange runs at the same time."""
    optimizer_bytes: float
    """Bytes moved for each parameter that the optimizer updates."""
    expert_share: Mapping[str, float] = field(hash=False)
    """Ratio of the rate of the grouped matrix products of many experts to the rate of one large
    product, by architecture and precision."""
    expert_traffic: float
    """Bytes moved for each value of a routed token, to sort the tokens by expert and to restore
    their order."""
    straggler: float
    """Standard deviation of one device's step time, as a share of the step time."""
    fragmentation: float
    """Ratio of the memory that the allocator reserves to the memory of live tensors."""
    communicator_bytes: float
    """Bytes of the buffers of one communicator on a device."""
    sigma: Mapping[str, float] = field(hash=False)
    """Standard deviation of each part of the logarithm of measured over predicted time
    (`prediction_error`)."""

    def matmul(self, architecture: str, precision: str) -> float:
        """Returns the share of the peak that large matrix products reach."""
        return _by_architecture(self.efficiency, architecture, _family(precision))

    def fused_attention(self, architecture: str, software: str) -> float:
        """Returns the share of the 16-bit peak that fused attention reaches."""
        groups = (MEGATRON_CORE, TORCH_FSDP)  # The software of a group has the same kernels.
        kernels = next((group[0] for group in groups if software in group), software)
        return _by_architecture(self.attention, architecture, kernels)

    def grouped_products(self, architecture: str, precision: str) -> float:
        """Returns the share of the rate of one large product that many experts' products reach."""
        bits = "8" if precision in LOW_PRECISIONS else "16"
        return _by_architecture(self.expert_share, architecture, bits)

    def lost_tiles(self, architecture: str) -> float:
        """Returns the tiles on each multiprocessor whose time a matrix product loses."""
        table = self.tile_loss
        return table[
            architecture if architecture in table else _FALLBACK.get(architecture, "hopper")
        ]

    def changed(self, **values: Any) -> CalibratedConstants:
        """Returns the constants with some values changed."""
        return replace(self, **values)

    def scaled(self, name: str, factor: float) -> CalibratedConstants:
        """Returns the constants with one of them, named as in `data/constants.json`, multiplied by
        a factor.
        """
        group, _, key = name.partition("/")
        value = getattr(self, group)
        return self.changed(
            **{group: {**value, key: value[key] * factor} if key else value * factor}
        )


@cache
def default_constants() -> CalibratedConstants:
    """Returns the constants that the package ships."""
    return constants_from(constants_document())


@cache
def constants_document() -> Mapping[str, Any]:
    """Returns the constants file's content: values, units, and the runs behind each constant."""
    found: Mapping[str, Any] = json.loads(data_text("constants.json"))
    return found


def constants_from(document: Mapping[str, Any]) -> CalibratedConstants:
    """Returns the constants of a document such as `data/constants.json`."""
    groups: dict[str, Any] = {
        "efficiency": {},
        "attention": {},
        "tile_loss": {},
        "expert_share": {},
        "sigma": {},
    }
    values: dict[str, Any] = {}
    for name, entry in document["constants"].items():
        group, _, key = name.partition("/")
        if key:
            groups[group][key] = entry["value"]
        else:
            values[name] = entry["value"]
    return CalibratedConstants(**groups, **values)


def _family(precision: str) -> str:
    return {"fp16": "16", "bf16": "16", "tf32": "32", "fp32": "32"}.get(precision, precision[2:])


def _by_architecture(table: Mapping[str, float], architecture: str, key: str) -> float:
    similar = _FALLBACK.get(architecture, "hopper")
    names = (architecture, similar, "ampere", "hopper", "blackwell")
    return next(table[f"{name} {key}"] for name in names if f"{name} {key}" in table)
