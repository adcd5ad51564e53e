"""The part of the results about the controller, from the JSON documents of several
programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median, quantiles
from typing import Any

from pages.target_rows import HEAD, at_most, target_row

Document = dict[str, Any]

RATIO_BAR, ADDED_US_BAR, ONE_ADDED_US_BAR, COLLECTIVES_BAR = 2.0, 3.0, 5.0, 1 / 5
HIDDEN_BAR, IDLE_BAR, TOLD_BAR_S = 0.95, 0.005, 1.0


def render_controller(documents: Mapping[str, Document]) -> list[str]:
    """Renders JSON documents as Markdown. Their names are `steps`, `idle`, `overlap`, and
    `train-TASK-nN`.
    """
    lines: list[str] = []
    for name, document in documents.items():
        draw = _PARTS.get(name, _training)
        lines += ["", *draw(name, document)] if lines else draw(name, document)
    return lines


# ---- benchmarks/controller_steps.py


def _steps(_: str, document: Document) -> Iterator[str]:
    yield "`python benchmarks/controller_steps.py`. *300 tensors*: every rank submits 300 tensors,"
    yield "3 MB in all, in a new order at each step, beside one all_reduce with copies in and out."
    yield "*One tensor*: submit and wait, beside an asynchronous all_reduce and its wait. Times are"
    yield "medians (quartiles)."
    yield from ("", *HEAD)
    for row in document["rows"]:
        yield from _step_targets(row)
    yield ""
    yield "| case | ranks | controller, us | direct, us | collectives a step | from the plan |"
    yield "|---|---|---|---|---|---|"
    for row in document["rows"]:
        times = [_spread(row[key], 1e6) for key in ("controller_s", "direct_s")]
        counts = (f"{row['collectives']:.1f}", f"{row['cache_hits']:.1%}")
        yield "| " + " | ".join([row["name"], str(row["ranks"]), *times, *counts]) + " |"


def _step_targets(row: Document) -> Iterator[str]:
    what = f"{row['name']}, n = {row['ranks']}"
    controller_s, direct_s = median(row["controller_s"]), median(row["direct_s"])
    added_us = 1e6 * (controller_s - direct_s) / row["tensors"]
    if row["tensors"] == 1:
        yield at_most(f"{what}: added to a direct call, us", ONE_ADDED_US_BAR, added_us, ".1f")
        return
    yield at_most(f"{what}: time over the direct call", RATIO_BAR, controller_s / direct_s, ".2f")
    yield at_most(f"{what}: added for each tensor, us", ADDED_US_BAR, added_us, ".2f")
    share = row["collectives"] / row["tensors"]
    yield at_most(f"{what}: collectives for each tensor", COLLECTIVES_BAR, share, ".3f")


# ---- benchmarks/controller_idle.py


def _idle(_: str, document: Document) -> Iterator[str]:
    yield "`python benchmarks/controller_idle.py`: a process that does nothing; the busiest rank."
    yield from ("", *HEAD)
    for row in document["rows"]:
        what = f"{row['name']}, n = {row['ranks']}"
        share = row["cpu_share"]
        yield target_row(
            f"{what}: processor time", f"<= {IDLE_BAR:.1%}", f"{share:.3%}", share <= IDLE_BAR
        )
        wake_ups = row["wake_ups"]
        yield target_row(f"{what}: wake-ups a second", "none", f"{wake_ups:.1f}", wake_ups < 1)


# ---- unisono train overlap --json


def _overlap(_: str, document: Document) -> Iterator[str]:
    yield "`unisono train overlap`: 96 x 12 gradients over one emulated link; computation and link"
    yield "are waits of given lengths. *Hidden* is the serial step minus the overlapped step."
    yield from ("", *HEAD)
    for result in document["results"]:
        ratio = result["exchange_s"] / result["compute_s"]
        hidden = result["hidden_s"] / result["hideable_s"]
        what = f"hidden of what overlap can hide, computation : exchange = 1 : {ratio:g}"
        yield target_row(what, f">= {HIDDEN_BAR:.0%}", f"{hidden:.1%}", hidden >= HIDDEN_BAR)
    yield from ("", "| 1 : exchange | case | messages | predicted, ms | measured, ms |")
    yield "|---|---|---|---|---|"
    for result in document["results"]:
        for case in result["cases"]:
            yield (
                f"| {result['exchange_s'] / result['compute_s']:g} | {case['name']} | "
                f"{case['messages']} | {1e3 * case['predicted_s']:.1f} | "
                f"{_spread(case['measured_s'], 1e3)} |"
            )


# ---- benchmarks/controller_failures.py


def _failures(_: str, document: Document) -> Iterator[str]:
    yield "`python benchmarks/controller_failures.py`: from the failure (the wrong tensor, the"
    yield "limit of a stall, the kill of a rank) to the error or warning on the slowest rank. The"
    yield "times are the largest of seven rounds. After a mismatch or a stall, the group works on."
    yield from ("", *HEAD)
    for row in document["rows"]:
        what = f"{row['case']}, n = {row['ranks']}: milliseconds until all ranks know"
        yield at_most(what, 1e3 * TOLD_BAR_S, 1e3 * max(row["seconds"]), ".1f")


# ---- unisono train TASK --with controller --json


def _training(name: str, document: Document) -> Iterator[str]:
    _, task, _ = name.split("-")
    runs, ranks = document["runs"], document["settings"]["ranks"]
    ours, *others = runs
    yield f"`unisono train {task} -n {ranks} --with controller`: the runs alternated."
    yield "Their loss curves agree." if document["ok"] else f"FAILED: {document['failures']}."
    yield from ("", *HEAD)
    for other in others:
        ratio = ours["step_median_s"] / other["step_median_s"]
        what = f"step of {ours['backend']} over {other['backend']}"
        yield at_most(f"{what}, {task}, n = {ranks}", 1.0, ratio, ".2f")
    yield from ("", "| run | step, ms | forward and backward alone, ms | added by exchange, ms |")
    yield "|---|---|---|---|"
    for run in runs:
        times = (run["step_median_s"], run["compute_median_s"], run["added_median_s"])
        yield f"| {run['backend']} | " + " | ".join(f"{1e3 * each:.2f}" for each in times) + " |"


def _spread(values: list[float], scale: float) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{scale * middle:.1f} ({scale * low:.1f}-{scale * high:.1f})"


_PARTS: Mapping[str, Callable[[str, Document], Iterator[str]]] = {
    "steps": _steps,
    "idle": _idle,
    "overlap": _overlap,
    "failures": _failures,
}
