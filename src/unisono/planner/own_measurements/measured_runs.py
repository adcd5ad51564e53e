"""Training runs whose step time was measured, and their files in JSON or CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.model_presets import load_model
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import Workload
from unisono.planner.positive_values import require_positive

_JOB = ("seq", "global_batch", "micro_batch", "precision", "recompute", "software")
_NEEDED = "expected runs with model, cluster, layout, seq, global_batch, step_s"


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


def read_own_runs(text: str) -> list[MeasuredRun]:
    """Returns the user's measured runs from a JSON or CSV text.

    JSON: a list of objects (or one object) with `model`, `cluster`, `layout`, `job` and `step_s`.
    `model`, `cluster` and `layout` are texts of the command line, or objects with the fields of
    `Transformer`, `Cluster` and `Layout`; `job` has the fields of `Workload`. CSV: columns `model`,
    `cluster`, `layout`, `step_s` and the fields of `Workload`. Raises ValueError for other texts,
    with the number of the entry.

    >>> (run,) = read_own_runs('''model,cluster,layout,seq,global_batch,micro_batch,step_s
    ... gpt3-1.7b,a100:8,"dp=8,zero=1",2048,64,4,1.9
    ... ''')
    >>> run.layout.zero, run.measured_s
    (1, 1.9)
    """
    found = []
    for number, entry in enumerate(_entries(text), 1):
        try:
            found.append(_run(entry))
        except (ValueError, TypeError, KeyError) as error:
            detail = f"lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"run {number}: {detail}") from error
    return found


def _entries(text: str) -> list[dict[str, Any]]:
    if text.lstrip().startswith(("[", "{")):
        document = json.loads(text)
        entries = document if isinstance(document, list) else [document]
    else:
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        entries = list(csv.DictReader(lines))
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{_NEEDED}; found none")
    for entry in entries:
        if "step_s" not in entry:
            raise ValueError(f"{_NEEDED}; found {', '.join(map(str, entry))}")
    return entries


def _run(entry: Mapping[str, Any]) -> MeasuredRun:
    values = {name: entry[name] for name in _JOB if entry.get(name) not in (None, "")}
    values.update(entry.get("job") or {})
    for name in ("seq", "global_batch", "micro_batch"):
        if values.get(name) is not None:
            values[name] = int(values[name])
    missing = [name for name in ("seq", "global_batch") if name not in values]
    if missing:
        raise ValueError(f"lacks {' and '.join(missing)}")
    measured_s = float(entry["step_s"])
    require_positive({"step_s": measured_s})
    model, cluster, layout = entry["model"], entry["cluster"], entry["layout"]
    is_long = [isinstance(each, Mapping) for each in (model, cluster, layout)]
    divided = Layout.from_document(layout) if is_long[2] else Layout.read(str(layout))
    return MeasuredRun(
        name=entry.get("name") or f"{'model' if is_long[0] else model} {divided.text()}",
        model=Transformer(**model) if is_long[0] else load_model(str(model)),
        cluster=Cluster.from_document(cluster) if is_long[1] else Cluster.read(str(cluster)),
        layout=replace(divided, vpp=1) if divided.pp == 1 else divided,
        job=Workload(**values),
        measured_s=measured_s,
    )
