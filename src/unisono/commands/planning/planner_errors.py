"""Tables of the planner's errors on published runs, and of its constants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.table import Table

from unisono import planner
from unisono.commands.planning.layout_tables import PlanOutput
from unisono.commands.planning.plan_options import PlanOptions
from unisono.planner import ErrorRow, JudgedErrors, MemoryComparison, RankedGroup


def errors_output(options: PlanOptions) -> PlanOutput:
    """Returns tables of the errors of times and memory on published runs, and of the constants."""
    written = []
    if options.plot_path is not None:
        planner.save_validation_plot(options.plot_path)
        written.append(options.plot_path)
    rows, memory = planner.validate(), planner.validate_memory()
    judged, rankings = planner.judged_errors(), planner.rankings()
    document = {
        "errors": [asdict(row) for row in rows],
        "judged": [asdict(row) for row in judged],
        "rankings": [asdict(group) for _, groups in rankings for group in groups],
        "memory": [
            {
                "source": each.run.source,
                "name": each.run.note,
                "measured_bytes": each.run.memory_bytes,
                "predicted_bytes": each.predicted_bytes,
            }
            for each in memory
        ],
        "constants": planner.constants_document()["constants"],
    }
    parts = [
        _errors_table(rows),
        _judged_table(judged),
        _ranking_table(rankings),
        _intervals_table(rows),
        _own_runs_table(rows),
        _memory_table(memory),
        _constants_table(),
    ]
    return PlanOutput(parts=parts, document=document, written=written)


def _errors_table(rows: Sequence[ErrorRow]) -> Table:
    columns = ("source", "runs", "fitted", "held out", "one run", "worst", "tau", "regret")
    caption = (
        "fitted: constants fitted to all sources. held out, and columns after it: constants "
        "fitted to the other sources. one run: held out, calibrated with one other run of the same "
        "source. tau, regret: order of runs that differ in layout only."
    )
    title = "step time: mean absolute error by source"
    return _by_source(title, columns, map(_error_cells, rows), caption)


def _error_cells(row: ErrorRow) -> tuple[str, ...]:
    own = row.with_own_runs(1)
    return (
        row.family,
        str(row.runs),
        f"{row.fitted:.1%}",
        f"{row.held_out:.1%}",
        "-" if own is None else f"{own.error:.1%}",
        f"{row.worst:.0%}",
        "-" if row.tau is None else f"{row.tau:.2f}",
        "-" if row.regret is None else f"{row.regret:.1%}",
    )


def _by_source(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str
) -> Table:
    table = Table(title=title, title_justify="left", caption=caption)
    for name in columns:
        table.add_column(name, justify="left" if name == "source" else "right")
    for cells in rows:
        table.add_row(*cells)
    return table


def _judged_table(rows: Sequence[JudgedErrors]) -> Table:
    caption = (
        "error: mean absolute error of the step time. bias: mean of measured over predicted time. "
        "predicted to fit: all of these runs did fit in memory. tau, regret: order of runs that "
        "differ in layout only."
    )
    return _by_source(
        "runs that no constant was fitted to, by source",
        planner.JUDGED_COLUMNS,
        planner.judged_cells(rows),
        caption,
    )


def _ranking_table(rankings: Sequence[tuple[str, list[RankedGroup]]]) -> Table:
    caption = (
        "sources of the fit: constants fitted to the other sources. limit of tau: that of a "
        "perfect planner. regret: measured time of the predicted best layout over the best time, "
        "minus 1."
    )
    return _by_source(
        "order of runs that differ in layout only",
        planner.RANKING_COLUMNS,
        planner.ranking_cells(rankings),
        caption,
    )


def _intervals_table(rows: Sequence[ErrorRow]) -> Table:
    columns = ("source", "bias", "spread", "held out", "width", "fitted", "width")
    caption = (
        "bias, spread: mean and standard deviation of the logarithm of measured over predicted "
        "time, held out. held out, fitted: share of runs inside the interval, with the "
        "constants of the table above. width: median ratio of the interval's ends."
    )
    cells = [
        (
            row.family,
            f"{row.bias:+.3f}",
            f"{row.spread:.3f}",
            f"{row.covered:.0%}",
            f"{row.width:.2f}",
            f"{row.fitted_covered:.0%}",
            f"{row.fitted_width:.2f}",
        )
        for row in rows
    ]
    return _by_source("80 % intervals by source", columns, cells, caption)


def _own_runs_table(rows: Sequence[ErrorRow]) -> Table:
    columns = ("source", "own runs", "error before", "error", "in the interval", "width")
    caption = (
        "constants fitted to the other sources. error before: mean absolute error of the same runs "
        "without own runs. in the interval: share of runs inside the 80 % interval. width: median "
        "ratio of the interval's ends."
    )
    cells = [
        (
            row.family if each is row.own[0] else "",
            str(each.runs),
            f"{each.blind_error:.1%}",
            f"{each.error:.1%}",
            f"{each.covered:.0%}",
            f"{each.width:.2f}",
        )
        for row in rows
        for each in row.own
    ]
    return _by_source("calibration with runs of the same source", columns, cells, caption)


def _memory_table(rows: Sequence[MemoryComparison]) -> Table:
    table = Table(title="reserved memory of a device", title_justify="left")
    for name in ("source", "run", "measured", "predicted", "error"):
        table.add_column(name, justify="left" if name in ("source", "run") else "right")
    for each in rows:
        measured = each.run.memory_bytes or 0.0
        table.add_row(
            each.run.source,
            each.run.note,
            f"{measured / 2**30:.1f} GiB",
            f"{each.predicted_bytes / 2**30:.1f} GiB",
            f"{each.predicted_bytes / measured - 1:+.0%}",
        )
    return table


def _constants_table() -> Table:
    table = Table(title="constants", title_justify="left")
    for name in ("constant", "value", "unit", "prior", "fitted to"):
        table.add_column(name, justify="right" if name in ("value", "prior") else "left")
    for name, entry in planner.constants_document()["constants"].items():
        sources = ", ".join(entry.get("fitted_to", [])) or "stated, not fitted"
        table.add_row(
            name, f"{entry['value']:.4g}", entry["unit"], f"{entry['prior']:.4g}", sources
        )
    return table
