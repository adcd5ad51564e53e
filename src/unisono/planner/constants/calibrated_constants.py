"""The physical constants of the time and memory model, and the rows that each was fitted to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from unisono.planner.data_files import data_text

_FALLBACK = {"volta": "ampere", "davinci": "ampere", "cdna3": "hopper", "cpu": "ampere"}


@dataclass(frozen=True, kw_only=True)
class CalibratedConstants:
    """Constants with a physical meaning. `data/constants.json` says what each was fitted to.

    >>> 0.3 < default_constants().matmul("ampere", "fp16") < 1
    True
    """

    efficiency: Mapping[str, float] = field(hash=False)
    """Share of the peak that large matrix products reach, by architecture and precision."""
    attention: Mapping[str, float] = field(hash=False)
    """Share of the 16-bit peak that fused attention reaches in forward, by architecture and
    software."""
    tile_loss: float
    """Loss by incomplete waves, in tiles of 128 x 128 outputs for each multiprocessor."""
    inner_loss: float
    """Inner dimension at which a matrix product reaches half of its rate."""
    kernel_start_s: float
    """Device time of a kernel besides its FLOPs and bytes: start, and gap to the next kernel."""
    memory_share: float
    """Share of the memory rate that kernels reach."""
    traffic: float
    """Bytes that kernels between the matrix products move, over the bytes of fused kernels."""
    score_traffic: float
    """Bytes moved for each score of unfused attention in forward."""
    eager_launch_s: float
    """Host time of forward of a layer, fp16 software of 2021 and 2022."""
    launch_s: float
    """Host time of forward of a layer, later software."""
    expert_launch_s: float
    """Host time of forward of a layer with experts, beside `launch_s`."""
    pair_launch_s: float
    """Host time of a collective in a layer, for each pair of its ranks, fp16 software of 2021 and
    2022: its ranks launch at different times and wait for each other."""
    eager_step_s: float
    """Host time of a step beside its microbatches, fp16 software of 2021 and 2022."""
    step_s: float
    """Host time of a step beside its microbatches, later software."""
    microbatch_s: float
    """Host time of a microbatch beside its layers, fp16 software of 2021 and 2022."""
    link_share: float
    """Share of the rate inside a domain that collectives reach."""
    link_start_s: float
    """Start of a collective inside a domain."""
    link_rank_s: float
    """Start for each further rank inside a domain."""
    network_share: float
    """Share of the rate between domains that collectives reach."""
    network_start_s: float
    """Start of a collective between domains, for each doubling of the domains."""
    exchange_share: float
    """Share of the rate between domains that an exchange of experts reaches."""
    tensor_exposed: float
    """Exposed share of tensor-parallel exchanges of software that overlaps them."""
    overlap_slowdown: float
    """Slowdown of compute while an exchange runs beside it."""
    optimizer_bytes: float
    """Bytes moved for each parameter that the optimizer updates."""
    expert_share: float
    """Rate of the experts' grouped matrix products over the rate of one large product."""
    expert_traffic: float
    """Bytes moved to sort the tokens by expert and back, for each value of a routed token."""
    straggler: float
    """Standard deviation of one device's step, as a share."""
    fragmentation: float
    """Reserved memory over the memory of live tensors."""
    sigma: Mapping[str, float] = field(hash=False)
    """Standard deviation of the logarithm of the error: base, and added by kind."""
    shared: Mapping[str, float] = field(hash=False)
    """Shares of the error's variance that runs of one machine, model and work have in common."""

    def matmul(self, architecture: str, precision: str) -> float:
        """Returns the share of the peak that large matrix products reach."""
        return _by_architecture(self.efficiency, architecture, _family(precision))

    def fused_attention(self, architecture: str, software: str) -> float:
        """Returns the share of the 16-bit peak that fused attention reaches."""
        return _by_architecture(self.attention, architecture, software)

    def changed(self, **values: Any) -> CalibratedConstants:
        """Returns the constants with some values changed."""
        return replace(self, **values)


@cache
def default_constants() -> CalibratedConstants:
    """Returns the constants that the package ships."""
    return constants_from(constants_document())


@cache
def constants_document() -> Mapping[str, Any]:
    """Returns the file of constants: values, units, and the rows that each was fitted to."""
    found: Mapping[str, Any] = json.loads(data_text("constants.json"))
    return found


def constants_from(document: Mapping[str, Any]) -> CalibratedConstants:
    """Returns the constants of a document such as `data/constants.json`."""
    groups: dict[str, Any] = {"efficiency": {}, "attention": {}, "sigma": {}, "shared": {}}
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
    for name in (architecture, _FALLBACK.get(architecture, "hopper"), "ampere"):
        found = table.get(f"{name} {key}")
        if found is not None:
            return found
    return table[f"hopper {key}"]
