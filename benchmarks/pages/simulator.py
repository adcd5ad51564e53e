"""Parts of the results about the simulator: its errors and its run time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from tables import nccl

from pages.target_rows import HEAD, at_most
from unisono.bench.sizes import format_size
from unisono.simulator.calibration import Holdout, calibrate, holdout, of_contestant
from unisono.simulator.measurement_files import Sample, read

MEDIAN_LAB, WORST_LAB = 0.05, 0.15
MEDIAN_SHARED_MEMORY, MEAN_NCCL = 0.10, 0.03
HALVES: Sequence[tuple[Literal[0, 1], str]] = ((0, "first half"), (1, "second half"))


def render_lab(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Renders the JSON rows of `simulator_lab.py` as Markdown."""
    errors = [abs(row["error"]) for row in rows]
    lines = [
        "`python benchmarks/simulator_lab.py` (root). docs/simulator.md has the options of each",
        "run and the sources of errors. All_reduce, measured ms (error of the simulation).",
        "",
        *HEAD,
        at_most(f"median error of {len(rows)} rows", MEDIAN_LAB, median(errors), ".1%"),
        at_most("worst error", WORST_LAB, max(errors), ".1%"),
        "",
    ]
    sizes = sorted({row["nbytes"] for row in rows})
    head = ("hosts", "algorithm", *map(format_size, sizes))
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for kind, found in groupby(rows, lambda row: (row["hosts"], row["algorithm"])):
        of = {
            row["nbytes"]: f"{row['measured_s'] * 1e3:.0f} ({row['error']:+.1%})" for row in found
        }
        lines.append("| " + " | ".join((*kind, *(of.get(size, "") for size in sizes))) + " |")
    return lines


def render_speed(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `simulator.py` as Markdown."""
    lines = [
        "`python benchmarks/simulator.py`: all_reduce of 1 GB, on one core.",
        "",
        "| case | transfers | built, s | simulated, s | target, s | peak, GiB (target: 4) "
        "| reached |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in document["cases"]:
        most = case["bar_s"]
        reached = most is None or (case["simulated_s"] <= most and case["peak_GiB"] <= 4)
        shown = "-" if most is None else ("yes" if reached else "**no**")
        lines.append(
            f"| {case['case']} | {case['transfers']:,} | {case['built_s']:.2f} | "
            f"{case['simulated_s']:.2f} | {'-' if most is None else most} | "
            f"{case['peak_GiB']:.2f} | {shown} |"
        )
    return lines


def render_calibration(runs: Sequence[Path]) -> list[str]:
    """Renders the errors of link models that are fitted to files of `unisono bench --json`. There
    are several files for each number of ranks.
    """
    lines = [
        "Link models are fitted to all sizes (calibrated), or to alternate sizes: from the",
        "smallest on (first half) or from the next on (second half). Errors of halves are at the",
        "sizes in between. This machine's shared memory: four runs of `unisono bench all_reduce",
        "-n 2 --sizes 8:64M:x2 --against '' --rounds 9 --json run.json`, and four with `-n 4`.",
        "NCCL: all_reduce on 2 to 8 A100, 1 MiB to 1 GiB, from the table that comes with vTrain;",
        "means over the numbers of GPUs. docs/simulator.md explains the difference of its halves.",
        "",
        *HEAD,
    ]
    for stem, files in groupby(runs, lambda path: path.stem.rpartition("-")[0]):
        samples = [s for path in files for s in of_contestant(read(path.read_text()), "unisono")]
        ranks = stem.removeprefix("calibration-n")
        found = {"calibrated": _described(samples)}
        found |= {called: _held(samples, half).median for half, called in HALVES}
        for called, error in found.items():
            name = f"{ranks} ranks, median error, {called}"
            lines.append(at_most(name, MEDIAN_SHARED_MEMORY, error, ".1%"))
    for half, called in HALVES:
        errors = [_held([s for s in nccl() if s.ranks == n], half).mean for n in range(2, 9)]
        lines.append(at_most(f"NCCL, mean error, {called}", MEAN_NCCL, mean(errors), ".1%"))
    return lines


def _described(samples: Sequence[Sample]) -> float:
    """Fits a model to the samples. Returns its median relative error at the sizes of the fit."""
    (model,) = calibrate(samples)
    times_s: dict[float, list[float]] = {}
    for sample in samples:
        times_s.setdefault(sample.nbytes, []).append(sample.seconds)
    return median(abs(model.predict(n) / median(found) - 1) for n, found in times_s.items())


def _held(samples: Sequence[Sample], half: Literal[0, 1]) -> Holdout:
    held = holdout(samples, half=half)
    assert held is not None, "the samples have at least 4 sizes"
    return held
