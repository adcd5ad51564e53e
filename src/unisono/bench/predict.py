"""Adds times that link models predict to the measurements of Unisono."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unisono.bench.results import RunReport
from unisono.simulator import LinkModel, models_of, nearest


def read_models(path: Path, ops: Sequence[str]) -> tuple[LinkModel, ...]:
    """Reads link models from a file of `unisono calibrate --out`, or fits models to a file of
    measurements.

    Raises `ValueError` if the file has no model of one of the operations.
    """
    models = models_of(path.read_text(encoding="utf-8"), source=path.name)
    known = sorted({model.op for model in models})
    for op in ops:
        if op not in known:
            raise ValueError(f"{path}: no model of {op}, only of {', '.join(known)}")
    return tuple(models)


def with_predictions(report: RunReport, models: Sequence[LinkModel]) -> RunReport:
    """Returns the report with a predicted time in each row."""
    rows = []
    for row in report.rows:
        case = row.case
        model = nearest(models, case.op, case.ranks)
        predicted_s = model.predict(case.size_bytes, ranks=case.ranks) if case.ranks > 1 else None
        rows.append(replace(row, predicted_s=predicted_s))
    return replace(report, rows=tuple(rows))
