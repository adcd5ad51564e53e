"""Compares simulated algorithms. Returns a table, JSON and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.commands.simulate.simulation_request import Output

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.commands.simulate.simulation_request import Show, SimulationRequest
    from unisono.simulator import ComparedAlgorithm, Result

COLUMNS = ("time", "algbw", "busbw", "busiest link", "usage")
_BINS = 192


def run(task: SimulationRequest, svg_path: Path | None, sizes: str, show: Show) -> Output:
    """Simulates the algorithms on one network. Returns the table, the JSON document, lines and
    files of the command."""
    entries, bound = task.compare(task.nbytes, show), task.bound_s(task.topology)
    first = best(entries)
    files = list(pictures(task, first))
    if svg_path is not None:
        done = [entry.algorithm for entry in entries if entry.result is not None]
        files.append((svg_path, chart_of_sizes(replace(task, names=done), sizes, show)))
    lines = task.model_lines
    if task.details.critical:
        lines += critical_lines(first)
    if task.names is not None:
        lines += [f"skipped: {e.algorithm}: {e.reason}" for e in entries if e.result is None]
    else:
        lines += too_large_lines(task, {e.algorithm: e.reason for e in entries if e.too_large})
    return Output(
        table=table(task, entries, bound),
        document=document(task, entries, bound),
        lines=lines,
        files=files,
    )


def too_large_lines(task: SimulationRequest, reasons: Mapping[str, str]) -> list[str]:
    """Returns lines with the reason for each skipped algorithm, and a command that simulates the
    first skipped algorithm without limits."""
    if not reasons:
        return []
    first = next(iter(reasons))
    how = f"unisono simulate {task.op} {first} --topology {task.spec}"
    return [
        *(f"skipped: {name}: {reason}" for name, reason in reasons.items()),
        f"a named algorithm is simulated to its end ({how}); --budget extends the time for all",
    ]


def pictures(
    task: SimulationRequest, best: ComparedAlgorithm, placement: tuple[int, ...] | None = None
) -> Iterator[tuple[Path, str]]:
    """Yields the requested heat map and trace of one algorithm, as (path, contents)."""
    from unisono.show import link_heat_map
    from unisono.simulator import Job, simulate, to_chrome_trace

    assert best.schedule is not None and best.result is not None, (
        "callers pass a simulated algorithm"
    )
    if (heat_path := task.details.heat_path) is not None:
        job = Job(schedule=best.schedule, nbytes=task.nbytes, ranks=placement)
        result = simulate([job], task.topology, conditions=task.conditions, bins=_BINS)
        yield (
            heat_path,
            link_heat_map(result, f"{task.op} by {best.algorithm} on {task.topology.name}"),
        )
    if (trace_path := task.details.trace_path) is not None:
        yield trace_path, to_chrome_trace(best.result)


def chart_of_sizes(task: SimulationRequest, sizes: str, show: Show) -> str:
    """Returns an SVG chart of the times of all algorithms over sizes."""
    from unisono.bench import parse_sizes
    from unisono.show import time_chart

    lines: dict[str, list[tuple[float, float]]] = {}
    for nbytes in parse_sizes(sizes):
        for entry in task.compare(nbytes, show):
            if entry.result is not None and entry.result.time_s > 0:
                lines.setdefault(entry.algorithm, []).append((nbytes, entry.result.time_s))
    return time_chart(f"{task.op} on {task.topology.name}", lines)


def table(task: SimulationRequest, entries: Sequence[ComparedAlgorithm], bound: float) -> Table:
    """Returns the comparison as a table."""
    from unisono.show import bytes_text, time_text

    ranks = task.topology.num_ranks
    title = f"{task.op} of {bytes_text(task.nbytes)} on {task.topology.name}, {ranks} ranks"
    found = new_table(title, "algorithm", *COLUMNS, "of the bound")
    for entry in entries:
        if entry.result is not None:
            found.add_row(
                entry.algorithm, *cells(task, entry.result, ranks), of_bound(bound, entry.result)
            )
    found.caption = f"bound: {time_text(bound)}" if bound else None
    return found


def new_table(title: str, *columns: str) -> Table:
    """Returns an empty table in which columns of names are left-aligned and columns of numbers are
    right-aligned."""
    from rich.table import Table

    found = Table(title=title, title_justify="left")
    for name in columns:
        left = name in ("algorithm", "busiest link", "order", "ranks in order")
        found.add_column(name, justify="left" if left else "right")
    return found


def cells(task: SimulationRequest, result: Result, ranks: int) -> tuple[str, ...]:
    """Returns the cells of one result in the columns `COLUMNS`."""
    from unisono.show import rate_text, time_text

    link, algbw_Bps = result.busiest_link, result.algbw_Bps(task.nbytes)
    return (
        time_text(result.time_s),
        rate_text(algbw_Bps),
        rate_text(algbw_Bps * _bus_factor(task.op, ranks)),
        result.link_name(link) if link >= 0 else "",
        f"{result.utilisation[link]:.0%}" if link >= 0 else "",
    )


def of_bound(bound: float, result: Result) -> str:
    """Returns the ratio of the lower bound to the simulated time, as text."""
    return f"{bound / result.time_s:.0%}" if result.time_s else ""


def _bus_factor(op: str, ranks: int) -> float:
    from unisono.bench import OPERATIONS

    return OPERATIONS[op].bus_factor(ranks) if op in OPERATIONS else 1.0


def best(entries: Sequence[ComparedAlgorithm]) -> ComparedAlgorithm:
    """Returns the fastest algorithm. Raises ValueError if no algorithm has a result."""
    found = next((entry for entry in entries if entry.result is not None), None)
    if found is None:
        raise ValueError("; ".join(entry.reason for entry in entries))
    return found


def critical_lines(entry: ComparedAlgorithm) -> list[str]:
    """Returns lines of text with the last steps of the critical path."""
    from unisono.show import bytes_text, time_text
    from unisono.simulator import TaskKind

    assert entry.result is not None, "callers pass a simulated algorithm"
    path = entry.result.critical_path()
    lines = [f"critical path: {len(path)} steps; the last steps:"]
    for step in path[-4:]:
        what = f"{step.kind.name.lower()} at rank {step.src}"
        if step.kind is TaskKind.MESSAGE:
            what = f"rank {step.src} to rank {step.dst}"
        took = f"{time_text(step.begun_s)} to {time_text(step.arrived_s)}"
        lines.append(f"  round {step.round}: {what}, {bytes_text(step.bytes)}, {took}")
    return lines


def document(
    task: SimulationRequest, entries: Sequence[ComparedAlgorithm], bound: float
) -> dict[str, Any]:
    """Returns the comparison as JSON."""
    ranks = task.topology.num_ranks
    return {
        "op": task.op,
        "topology": task.topology.name,
        "ranks": ranks,
        "nbytes": task.nbytes,
        "bound_s": bound,
        "algorithms": [row(task, entry, ranks) for entry in entries],
    }


def row(task: SimulationRequest, entry: ComparedAlgorithm, ranks: int) -> dict[str, Any]:
    """Returns the result of one algorithm as JSON."""
    result = entry.result
    if result is None:
        found: dict[str, Any] = {"algorithm": entry.algorithm, "reason": entry.reason}
        return {**found, "too_large": True} if entry.too_large else found
    link, algbw_Bps = result.busiest_link, result.algbw_Bps(task.nbytes)
    return {
        "algorithm": entry.algorithm,
        "time_s": result.time_s,
        "algbw_Bps": algbw_Bps,
        "busbw_Bps": algbw_Bps * _bus_factor(task.op, ranks),
        "busiest_link": link,
        "busiest_link_name": result.link_name(link) if link >= 0 else "",
        "busiest_link_utilisation": float(result.utilisation[link]) if link >= 0 else 0.0,
        "messages": entry.messages,
    }
