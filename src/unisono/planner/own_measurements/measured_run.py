"""A training run whose step time was measured."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import Workload


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run with its configuration and its step time."""

    name: str
    model: Transformer
    cluster: Cluster
    layout: Layout
    job: Workload
    measured_s: float
    """Seconds of one optimizer step."""
