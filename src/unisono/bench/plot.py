"""Plots of a run: time and bus bandwidth over size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.bench.contestants import LIMITS
from unisono.bench.results import Row, RunReport
from unisono.bench.sizes import format_size
from unisono.figures import new_figure


def save_plot(report: RunReport, path: Path) -> None:
    """Writes a PNG with one row of panels per operation. Raises UnsupportedError if matplotlib is
    missing."""
    operations = list(dict.fromkeys(row.case.op for row in report.rows))
    figure = new_figure(11, 4.2 * len(operations))
    panels = figure.subplots(len(operations), 2, squeeze=False)
    for op, (time_panel, rate_panel) in zip(operations, panels, strict=True):
        rows = [row for row in report.rows if row.case.op == op and row.case.size_bytes]
        for name in report.contestants:
            sizes, times_us, rates_GBps = _series(rows, name)
            if not sizes:
                continue
            style = {"linestyle": "--", "color": "grey"} if name in LIMITS else {"marker": "."}
            time_panel.plot(sizes, times_us, label=name, **style)
            if name not in LIMITS:
                rate_panel.plot(sizes, rates_GBps, label=name, **style)
        for panel in (time_panel, rate_panel):
            _set_sizes(panel, sorted({row.case.size_bytes for row in rows}))
        time_panel.set_yscale("log")
        time_panel.set_ylabel("time (us)")
        rate_panel.set_ylabel("bus bandwidth (GB/s)")
        time_panel.set_title(f"{op}, {report.rows[0].case.ranks} ranks")
    figure.savefig(path, format="png", dpi=120)


def _set_sizes(panel: Any, sizes: list[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45)
    panel.set_xlabel("size (bytes)")
    panel.grid(alpha=0.3)
    panel.legend()


def _series(rows: list[Row], name: str) -> tuple[list[int], list[float], list[float]]:
    sizes, times_us, rates_GBps = [], [], []
    for row in rows:
        measurement = row.of(name)
        if measurement is None or measurement.median_s is None:
            continue
        sizes.append(row.case.size_bytes)
        times_us.append(measurement.median_s * 1e6)
        rates_GBps.append((row.busbw_Bps(measurement) or 0.0) / 1e9)
    return sizes, times_us, rates_GBps
