"""Published training runs, with the step times that the planner is fitted to and tested on."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from unisono.planner.data_files import data_text
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import Workload
from unisono.planner.validation.published_choices import published_choices

_NETWORK_BPS = {"vTrain multi": 12.5e9}
"""Rates between hosts that differ from the device's usual ones. vTrain: 800 Gbit/s for 8 devices
(github VIA-Research/vTrain, `inter_node_bandwidth` of its configurations)."""

_SOFTWARE = {"llm-foundry MPT": "torch-2023"}
"""Software that differs from the default. MPT: attention `flash` or `triton` of FlashAttention 1
(github mosaicml/llm-foundry, scripts/train/benchmarking/sweep.py of 2023)."""

_MODEL_NUMBERS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"),
    *("experts", "top_k", "expert_ffn"),
)
_AXES = ("dp", "tp", "pp", "cp", "ep")
_NUMBERS = (
    *_MODEL_NUMBERS,
    *_AXES,
    *("gpus", "per_host", "seq", "micro_batch", "global_batch", "vpp", "zero"),
)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One published run, with its configuration and its step time."""

    source: str
    """Publication or release, as named in `data/training_runs.csv`."""
    name: str
    """Name of the model in the source."""
    model: Transformer
    cluster: Cluster
    layout: Layout
    job: Workload
    measured_s: float
    """Seconds of one optimizer step."""
    memory_bytes: float | None
    """Bytes of reserved memory of a device, or None if they are not published."""
    note: str

    @property
    def family(self) -> str:
        """Family of the source: sources with the same software and hardware, such as all releases
        of Megatron-Bridge.
        """
        for start in ("MLPerf", "torchtitan", "Megatron-Bridge"):
            if self.source.startswith(start):
                return start
        return self.source


@cache
def measured_runs() -> tuple[MeasuredRun, ...]:
    """Returns the runs that the package ships (`data/training_runs.csv` names their sources).

    >>> len(measured_runs()) > 1000
    True
    """
    text = data_text("training_runs.csv")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(run_of_row(row) for row in csv.DictReader(lines))


def run_of_row(row: Mapping[str, str]) -> MeasuredRun:
    """Returns the run of a row of the table. Empty cells mean values that are not stated. For some
    sources, other publications state them (`published_choices`).
    """
    numbers = {name: int(float(row[name])) if row.get(name) else None for name in _NUMBERS}
    known = published_choices(row)
    for name, value in (("micro_batch", known.micro_batch), ("vpp", known.vpp)):
        numbers[name] = numbers[name] or value
    memory = row.get("memory_GiB")
    return MeasuredRun(
        source=row["source"],
        name=row["model"],
        model=_model_of_row(row, numbers),
        cluster=Cluster(
            device=row["device"],
            devices=numbers["gpus"] or 1,
            per_host=numbers["per_host"],
            network_Bps=_NETWORK_BPS.get(row["source"]),
        ),
        layout=_layout_of_row(row, numbers),
        job=Workload(
            seq=numbers["seq"] or 0,
            global_batch=numbers["global_batch"] or 0,
            micro_batch=numbers["micro_batch"],
            precision=row["precision"],
            recompute=row["recompute"] or known.recompute,
            software=known.software or _SOFTWARE.get(row["source"]),
        ),
        measured_s=float(row["measured_s"]),
        memory_bytes=float(memory) * 2**30 if memory else None,
        note=row.get("note", ""),
    )


def _model_of_row(row: Mapping[str, str], numbers: Mapping[str, int | None]) -> Transformer:
    sizes: dict[str, Any] = {name: numbers[name] or 0 for name in _MODEL_NUMBERS}
    return Transformer(
        **sizes,
        gated=row["gated"] == "1",
        tied=row["tied"] == "1",
    )


def _layout_of_row(row: Mapping[str, str], numbers: Mapping[str, int | None]) -> Layout:
    axes: dict[str, Any] = {name: numbers[name] or 1 for name in _AXES}
    return Layout(
        **axes,
        vpp=1 if numbers["pp"] == 1 else numbers["vpp"],
        sequence_parallel=row["sequence_parallel"] == "1",
        zero=numbers["zero"] or 0,
    )
