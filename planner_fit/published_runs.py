"""Published training runs (`published_runs.csv`), with the inputs that the planner needs."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from published_choices import published_choices

from unisono.planner import Cluster, Layout, Prediction, Transformer, Workload, predict
from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.own_measurements.measured_runs import MeasuredRun

TABLE = Path(__file__).with_name("published_runs.csv")
_NETWORK_BPS = {"vTrain multi": 12.5e9}
"""Rates between hosts that differ from the device's usual ones. vTrain: 800 Gbit/s for 8 devices
(github VIA-Research/vTrain, `inter_node_bandwidth` of its configurations)."""
_DECIMAL = ("arXiv 2401.10241 table 4",)
"""Sources whose GB are 10^9 bytes. All others print GiB."""
_PUBLISHERS = ("MLPerf", "torchtitan", "Megatron-Bridge")
"""Beginnings of the names of sources that have software and machines in common."""
_MODEL_NUMBERS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"),
    *("experts", "top_k", "expert_ffn", "shared_experts", "dense_layers"),
    *("query_rank", "kv_rank", "rope_dim", "expert_groups", "token_groups"),
    *("window", "local_layers"),
)
_AXES = ("dp", "tp", "pp", "cp", "ep", "dp_replicate")
_NUMBERS = (
    *(*_MODEL_NUMBERS, *_AXES),
    *("gpus", "per_host", "seq", "micro_batch", "global_batch", "vpp", "zero"),
)
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class PublishedRun(MeasuredRun):
    """One published run, with its configuration and its step time."""

    table_source: str
    """Publication or release, as named in the table."""
    memory_bytes: float | None
    """Bytes of memory of a device, as printed, or None if they are not published."""
    note: str

    @property
    def source(self) -> str:
        """The source that is left out together: all rounds of MLPerf, and all releases of
        torchtitan or Megatron-Bridge, are one.
        """
        starts = (start for start in _PUBLISHERS if self.table_source.startswith(start))
        return next(starts, self.table_source)


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Returns the runs of the table, which names their sources."""
    text = TABLE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(run_of_row(row) for row in csv.DictReader(lines))


def run_of_row(row: Mapping[str, str]) -> PublishedRun:
    """Returns the run of a row of the table. Empty cells mean values that are not stated. For some
    sources, other publications state them (`published_choices`).
    """
    numbers = {name: int(float(row[name])) if row.get(name) else None for name in _NUMBERS}
    known = published_choices(row)
    for name, value in (("micro_batch", known.micro_batch), ("vpp", known.vpp)):
        numbers[name] = numbers[name] or value
    if known.balanced_gate and numbers["experts"] and numbers["top_k"]:
        numbers["expert_groups"] = numbers["experts"] // numbers["top_k"]
        numbers["token_groups"] = 1
    memory, network = row.get("memory_GiB"), row.get("network_Gbps")
    unit = 10**9 if row["source"] in _DECIMAL else 2**30
    return PublishedRun(
        table_source=row["source"],
        name=row["model"],
        model=Transformer(
            **{name: numbers[name] or 0 for name in _MODEL_NUMBERS},
            expert_vectors=known.expert_vectors,
            gated=row["gated"] == "1",
            tied=row["tied"] == "1",
        ),
        cluster=Cluster(
            device=row["device"],
            devices=numbers["gpus"] or 1,
            per_host=numbers["per_host"],
            network_Bps=float(network) * 1e9 / 8 if network else _NETWORK_BPS.get(row["source"]),
        ),
        layout=_layout_of_row(row, numbers),
        job=Workload(
            seq=numbers["seq"] or 0,
            global_batch=numbers["global_batch"] or 0,
            micro_batch=numbers["micro_batch"],
            precision=row["precision"],
            recompute=row["recompute"] or known.recompute,
            software=row.get("software") or known.software,
            states=known.states,
        ),
        measured_s=float(row["measured_s"]),
        memory_bytes=float(memory) * unit if memory else None,
        note=row.get("note", ""),
    )


def _layout_of_row(row: Mapping[str, str], numbers: Mapping[str, int | None]) -> Layout:
    axes: dict[str, Any] = {name: numbers[name] or 1 for name in _AXES}
    return Layout(
        **axes,
        vpp=1 if numbers["pp"] == 1 else numbers["vpp"],
        sequence_parallel=row["sequence_parallel"] == "1",
        zero=numbers["zero"] or 0,
        schedule=row.get("schedule") or "1f1b",
    )


def predict_run(run: MeasuredRun, constants: CalibratedConstants | None = None) -> Prediction:
    """Returns the prediction of a run."""
    return predict(run.model, run.cluster, run.layout, run.job, constants=constants)


def thinned(runs: Sequence[PublishedRun], largest: int) -> list[PublishedRun]:
    """Returns at most `largest` runs of each source: all of a small source, every k-th of a large
    one.
    """
    found = []
    for _, members in grouped(runs, lambda run: run.source):
        found += members[:: -(-len(members) // largest)]
    return found


def grouped(items: Iterable[_Item], key: Callable[[_Item], str]) -> list[tuple[str, list[_Item]]]:
    """Groups items by key, in the order of their first members."""
    found: dict[str, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.items())
