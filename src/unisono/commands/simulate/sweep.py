"""Runs `--sweep`, which simulates several values of one parameter, and returns a table, JSON and a
picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.commands.simulate import comparison
from unisono.commands.simulate.simulation_request import Output

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from unisono.commands.simulate.simulation_request import Show, SimulationRequest
    from unisono.simulator import Point


def read(text: str) -> tuple[str, list[str]]:
    """Parses `NAME=VALUE,VALUE,...`. Raises ValueError."""
    name, _, rest = text.partition("=")
    values = [value.strip() for value in rest.split(",") if value.strip()]
    if not name.strip() or not values:
        raise ValueError(f"--sweep {text}: expected a name and values, as in hosts=2,4,8")
    return name.strip(), values


def run(
    task: SimulationRequest, text: str, compute: str | None, svg_path: Path | None, show: Show
) -> Output:
    """Runs the sweep and returns its output. `compute` is the time for which each rank computes
    before it communicates, such as 10ms."""
    from unisono.topology import seconds

    compute_s = None if compute is None else seconds(compute)
    name, values = read(text)
    points = simulate(task, name, values, show)
    files = []
    if svg_path is not None:
        files.append((svg_path, picture(task, name, points, compute_s)))
    return Output(
        table=table(task, name, points, compute_s),
        document=document(task, name, points, compute_s),
        lines=task.model_lines + comparison.too_large_lines(task, _too_large(name, points)),
        files=files,
    )


def _too_large(name: str, points: Sequence[Point]) -> dict[str, str]:
    """Returns the reason for each skipped algorithm, at the first value for which it was
    skipped."""
    found: dict[str, str] = {}
    for point in points:
        for entry in point.entries:
            if entry.too_large:
                found.setdefault(entry.algorithm, f"{name}={point.value}: {entry.reason}")
    return found


def simulate(task: SimulationRequest, name: str, values: Sequence[str], show: Show) -> list[Point]:
    """Simulates all values of the parameter. Raises ValueError if there is a value for which no
    algorithm has a result."""
    from unisono.simulator import sweep

    points = sweep(
        task.op,
        task.spec,
        name,
        values,
        task.nbytes,
        names=task.names,
        levels=task.levels,
        conditions=task.conditions,
        limits=task.limits,
        progress=show,
    )
    for point in points:
        if point.best is None:
            reasons = "; ".join(dict.fromkeys(entry.reason for entry in point.entries))
            raise ValueError(f"{name}={point.value}: {reasons}")
    return points


def table(
    task: SimulationRequest, name: str, points: Sequence[Point], compute_s: float | None
) -> Table:
    """Returns a table with the fastest algorithm of each value. If `compute_s` is given, the table
    also has the scale factors."""
    from unisono.show import bytes_text, time_text
    from unisono.simulator import scale_factor

    title = f"{task.op} of {bytes_text(task.nbytes)} on {task.spec}, by {name}"
    # The lower bound is valid only if all ranks of a network take part.
    bounds = [p.topology.num_ranks == p.ranks and task.bound_s(p.topology) for p in points]
    extra = [
        *(["of the bound"] if any(bounds) else []),
        *([] if compute_s is None else ["scale factor"]),
    ]
    counts = name != "ranks"  # if not, the first column already has the number of ranks
    head = [name, *(["ranks"] if counts else []), "algorithm"]
    found = comparison.new_table(title, *head, *comparison.COLUMNS, *extra)
    for point, bound in zip(points, bounds, strict=True):
        best = point.best
        assert best is not None and best.result is not None, "simulate checks this"
        found.add_row(
            point.value,
            *([str(point.ranks)] if counts else []),
            best.algorithm,
            *comparison.cells(task, best.result, point.ranks),
            *([comparison.of_bound(bound, best.result) if bound else ""] if any(bounds) else []),
            *([] if compute_s is None else [f"{scale_factor(compute_s, best.result.time_s):.1%}"]),
        )
    if compute_s is not None:
        found.caption = (
            f"scale factor: T_n / (n T_1) if each rank computes {time_text(compute_s)}, then all "
            "communicate"
        )
    return found


def document(
    task: SimulationRequest, name: str, points: Sequence[Point], compute_s: float | None
) -> dict[str, Any]:
    """Returns the results of all values and algorithms as JSON."""
    from unisono.simulator import scale_factor

    rows: list[dict[str, Any]] = []
    for point in points:
        best = point.best
        assert best is not None and best.result is not None, "simulate checks this"
        rows.append(
            {
                "value": point.value,
                "topology": point.topology.name,
                "ranks": point.ranks,
                "algorithms": [comparison.row(task, entry, point.ranks) for entry in point.entries],
                "scale_factor": None
                if compute_s is None
                else scale_factor(compute_s, best.result.time_s),
            }
        )
    return {
        "op": task.op,
        "topology": task.spec,
        "nbytes": task.nbytes,
        "sweep": name,
        "compute_s": compute_s,
        "points": rows,
    }


def picture(
    task: SimulationRequest, name: str, points: Sequence[Point], compute_s: float | None
) -> str:
    """Returns an SVG chart over the values, with one line per algorithm. The vertical axis has
    times, or scale factors if `compute_s` is given."""
    from unisono.show import rate_text, time_chart, time_text
    from unisono.simulator import scale_factor

    positions = [_position(name, point) for point in points]
    texts = {"bandwidth": rate_text, "latency": time_text}
    lines: dict[str, list[tuple[float, float]]] = {}
    for position, point in sorted(zip(positions, points, strict=True), key=lambda pair: pair[0]):
        for entry in point.entries:
            if entry.result is not None and entry.result.time_s > 0:
                time_s = entry.result.time_s
                value = time_s if compute_s is None else scale_factor(compute_s, time_s)
                lines.setdefault(entry.algorithm, []).append((position, value))
    what = "" if compute_s is None else f": scale factor, {time_text(compute_s)} of computation"
    title = f"{task.op} on {task.spec} by {name}{what}"
    across = texts.get(name, lambda value: f"{value:g}")
    return time_chart(title, lines, across=across, shares=compute_s is not None)


def _position(name: str, point: Point) -> float:
    """Returns a value as a number for the axis. Raises ValueError if the number is not positive."""
    from unisono.topology import rate, seconds

    if name == "bandwidth":
        return rate(point.value)
    if name == "latency":
        return seconds(point.value)
    try:
        position = float(point.value)
    except ValueError:
        position = 0.0
    if not position > 0:
        raise ValueError(f"cannot draw {name}={point.value}: expected a number above 0")
    return position
