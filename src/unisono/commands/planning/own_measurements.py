"""Makes a calibration file from the user's measurements, and prints the calibration."""

from __future__ import annotations

from math import exp
from pathlib import Path

from rich.table import Table

from unisono import planner
from unisono.commands.planning.layout_tables import PlanOutput
from unisono.commands.planning.plan_inputs import read_cluster
from unisono.commands.planning.plan_options import PlanOptions
from unisono.planner import Calibration

_DEFAULT_PATH = Path("calibration.json")


def calibration_output(options: PlanOptions) -> PlanOutput:
    """Makes a calibration and writes it to a file. Returns the output. Raises ValueError."""
    cluster = None
    if options.cluster is not None:
        cluster = read_cluster(options.cluster, options.topology)
    found = planner.calibrate(options.files or (), cluster=cluster)
    path = options.save_path or _DEFAULT_PATH
    found.save(path)
    parts = []
    if found.links:
        parts.append(_links_table(found))
    if found.runs:
        parts.append(_runs_table(found))
    return PlanOutput(parts=parts, document=found.document(), written=[path])


def _links_table(calibration: Calibration) -> Table:
    table = Table(title="links", title_justify="left")
    for name in ("device", "links", "share of the rate", "start-up", "times", "error"):
        table.add_column(name, justify="left" if name in ("device", "links") else "right")
    for link in calibration.links:
        table.add_row(
            link.device,
            "in a domain" if link.place == "domain" else "between domains",
            f"{link.share:.1%}",
            f"x {link.start:.3g}",
            str(link.samples),
            f"{link.error:.1%}",
        )
    table.caption = "start-up: in comparison with the shipped constants. error: median of the fit."
    return table


def _runs_table(calibration: Calibration) -> Table:
    table = Table(title="own runs", title_justify="left")
    for name in ("run", "device", "software", "measured", "predicted", "measured / predicted"):
        left = name in ("run", "device", "software")
        table.add_column(name, justify="left" if left else "right")
    for run in calibration.runs:
        table.add_row(
            run.name,
            run.device,
            run.software,
            f"{run.measured_s:.4g} s",
            f"{run.predicted_s:.4g} s",
            f"{exp(run.error):.3f}",
        )
    return table
