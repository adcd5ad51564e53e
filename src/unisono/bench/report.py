"""Tables of a benchmark run, with the terms of nccl-tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unisono.bench.contestants import LIMITS, NETWORK
from unisono.bench.core_latency import describe_latency
from unisono.bench.results import Measurement, Row, RunReport
from unisono.bench.sizes import format_size

BUSY_CORES = 0.3
"""Number of busy cores before a run from which the report has a warning."""

_GIGA = 1e9
_MICRO = 1e-6
_NONE = "-"
_FOOTNOTE = (
    "size: larger buffer of a rank. time: median over rounds of the slowest rank's mean "
    "call (ping_pong, stream: per message). algbw: size / time; busbw: algbw x "
    "nccl-tests' factor (ping_pong, stream: all pairs). x ours: its time over ours "
    "(above 1: ours is faster). x limit: its time over {limit}. core ns: one-way latency "
    "between cores during the row."
)
_MEMORY_PASS = "one memory pass of all ranks"
_NETWORK_TIME = (
    "the time in which the links carry the bytes that any schedule moves between hosts, at the "
    "{rate}"
)
_MEASURED_RATE = "rate that iperf3 measured after the row"
_STATED_RATE = "stated rate, headers included"


def render_report(report: RunReport) -> RenderableType:
    """Returns one table per operation, notes on skipped contestants, and geometric means."""
    parts: list[RenderableType] = []
    for op, rows in groupby(report.rows, key=lambda row: row.case.op):
        parts.append(_render_operation(report, op, list(rows)))
    parts.append(Text(_FOOTNOTE.format(limit=_limit_text(report)), style="dim"))
    if (busy := report.machine.get("busy_cores", 0.0)) > BUSY_CORES:
        warning = f"other processes were using {busy:.1f} cores; these times are not reliable"
        parts.append(Text(warning, style="yellow"))
    parts += (Text(note, style="yellow") for note in _notes(report))
    parts += _render_means(report)
    if report.wrong:
        parts.append(Text(f"WRONG RESULTS: {report.wrong} elements", style="bold red"))
    return Group(*parts)


def _render_operation(report: RunReport, op: str, rows: list[Row]) -> Table:
    machine = report.machine
    where = f"{machine['cpu']}, {machine['cores']} cores" if machine else ""
    ranks = f"{rows[0].case.ranks} ranks{_hosts(report)}"
    paired = rows[0].case.operation.paired
    table = Table(title=f"{op}, {ranks} ({where})", title_justify="left")
    for column in ("size", "count"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("type", "redop", "contestant"):
        table.add_column(column, no_wrap=True)
    for column in (
        *("time us", "p25-p75", "algbw GB/s", "busbw GB/s"),
        *("x ours", "x limit", "core ns", "wrong"),
        *(("messages/s",) if paired else ()),
        *(("predicted us",) if _has_predictions(report) else ()),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        for index, measurement in enumerate(row.measurements):
            head = _case_cells(row) if index == 0 else ("",) * 4
            probe = describe_latency(row.probes_s) if index == 0 else ""
            table.add_row(
                *head,
                *_measurement_cells(report, row, measurement),
                probe,
                _wrong_cell(measurement),
                *((_messages(row, measurement),) if paired else ()),
                *((_prediction(report, row, measurement),) if _has_predictions(report) else ()),
                style="bold" if measurement.contestant == report.ours else None,
                end_section=index == len(row.measurements) - 1,
            )
    return table


def _limit_text(report: RunReport) -> str:
    """Returns the meaning of the limit with which contestants are compared."""
    if report.limit != NETWORK:
        return _MEMORY_PASS
    return _NETWORK_TIME.format(rate=_STATED_RATE if report.why_stated else _MEASURED_RATE)


def _hosts(report: RunReport) -> str:
    """Returns a text about the hosts and links of a run on a lab, or an empty text."""
    cluster = report.settings.get("cluster")
    if cluster is None:
        return ""
    payloads_Bps = [
        row.link.rate_Bps for row in report.rows if row.link and not row.link.why_stated
    ]
    rate = f", payload {median(payloads_Bps) * 8 / _GIGA:.3f} Gbit/s" if payloads_Bps else ""
    rails = f", {cluster['rails']} rails" if cluster["rails"] > 1 else ""
    return f" on {cluster['hosts']} hosts{rails}, links {cluster['rate'] or 'uncapped'}{rate}"


def _case_cells(row: Row) -> tuple[str, str, str, str]:
    case = row.case
    redop = case.redop if case.operation.reduces else "none"
    return str(case.size_bytes), str(case.count), case.dtype, redop


def _measurement_cells(report: RunReport, row: Row, measurement: Measurement) -> tuple[str, ...]:
    name = measurement.contestant
    if measurement.error is not None:
        return (name, "failed", *(_NONE,) * 5)
    spread_s = measurement.spread_s
    spread = f"{_time(spread_s[0])}-{_time(spread_s[1])}" if spread_s else _NONE
    ours = _NONE if name == report.ours else _ratio(row.ratio(name, report.ours))
    return (
        name,
        _time(measurement.median_s),
        spread,
        _rate(row.algbw_Bps(measurement)),
        _rate(None if name in LIMITS else row.busbw_Bps(measurement)),
        ours,
        _ratio(row.ratio(name, report.limit)),
    )


def _messages(row: Row, measurement: Measurement) -> str:
    per_s = row.messages_per_s(measurement)
    return _NONE if per_s is None else f"{per_s:,.0f}"


def _has_predictions(report: RunReport) -> bool:
    return any(row.predicted_s is not None for row in report.rows)


def _prediction(report: RunReport, row: Row, measurement: Measurement) -> str:
    """Returns Unisono's predicted time and its deviation from the measured time, as text."""
    if measurement.contestant != report.ours or row.predicted_s is None:
        return ""
    took_s = measurement.median_s
    off = f" ({row.predicted_s / took_s - 1:+.0%})" if took_s else ""
    return _time(row.predicted_s) + off


def _render_means(report: RunReport) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for name in report.contestants:
        ours, limit = report.mean_ratio(name), report.mean_limit_ratio(name)
        if name in LIMITS:
            continue
        if ours is not None and name != report.ours:
            text = f"geometric mean: {name} takes {ours:.2f} x the time of {report.ours}"
            lines.append(Text(text + (f", {limit:.2f} x the limit" if limit else "")))
        elif limit is not None and name == report.ours:
            lines.append(Text(f"geometric mean: {name} takes {limit:.2f} x the limit"))
    return lines


def _notes(report: RunReport) -> Iterator[str]:
    """Yields notes on contestants that were skipped or failed. The reason is the last line of the
    error."""
    if report.why_stated is not None:
        yield f"the limit is computed from the stated rate: {report.why_stated}"
    for name, reason in report.skipped.items():
        yield f"skipped {name}: {_last_line(reason)}"
    for row in report.rows:
        for measurement in row.measurements:
            if measurement.error is not None and measurement.contestant not in report.skipped:
                where = f"{row.case.op} {format_size(row.case.size_bytes)}"
                yield f"failed {measurement.contestant}, {where}: {_last_line(measurement.error)}"


def _last_line(text: str) -> str:
    return text.splitlines()[-1] if text else "no reason given"


def _wrong_cell(measurement: Measurement) -> str:
    if measurement.error is not None:
        return _NONE
    return f"[bold red]{measurement.wrong}[/]" if measurement.wrong else "0"


def _time(time_s: float | None) -> str:
    if time_s is None:
        return _NONE
    time_us = time_s / _MICRO
    return f"{time_us:.2f}" if time_us < 100 else f"{time_us:.0f}"


def _rate(rate_Bps: float | None) -> str:
    if rate_Bps is None:
        return _NONE
    return f"{rate_Bps / _GIGA:.{2 if rate_Bps >= _GIGA else 3}f}"


def _ratio(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}"
