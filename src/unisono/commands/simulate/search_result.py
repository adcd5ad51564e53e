"""Runs `--search` and returns the fastest algorithm, channels and order of ranks, as table and
JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.commands.simulate import comparison
from unisono.commands.simulate.simulation_request import Output

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.commands.simulate.simulation_request import Show, SimulationRequest
    from unisono.simulator import Search

_SHOWN = 12
_RANKS = 10


def run(task: SimulationRequest, budget_s: float, show: Show) -> Output:
    """Runs the search and returns its output."""
    from unisono.simulator import search

    done = search(
        task.op,
        task.topology,
        task.nbytes,
        names=task.names,
        levels=task.levels,
        conditions=task.conditions,
        budget_s=budget_s,
        progress=show,
    )
    bound, best = task.bound_s(task.topology), done.found[0]
    return Output(
        table=table(task, done, bound),
        document=document(task, done, bound),
        lines=task.model_lines + order_lines(done),
        files=list(comparison.pictures(task, best.entry, best.placement)),
    )


def table(task: SimulationRequest, done: Search, bound: float) -> Table:
    """Returns a table of the best combination of each algorithm."""
    from unisono.show import bytes_text

    ranks = task.topology.num_ranks
    title = f"fastest {task.op} of {bytes_text(task.nbytes)} on {task.topology.name}, {ranks} ranks"
    columns = ("algorithm", "order", *comparison.COLUMNS, "of the bound")
    made = comparison.new_table(title, *columns)
    for found in done.found[:_SHOWN]:
        assert found.entry.result is not None, "a search returns simulated algorithms"
        made.add_row(
            found.entry.algorithm,
            found.order,
            *comparison.cells(task, found.entry.result, ranks),
            comparison.of_bound(bound, found.entry.result),
        )
    caption = f"{done.simulated} combinations simulated; the best of each algorithm is listed"
    if done.pruned:
        caption += f"; {done.pruned} skipped because their bytes alone take longer"
    if done.late:
        caption += f"; {done.late} skipped because the time was up (--budget)"
    made.caption = caption
    return made


def order_lines(done: Search) -> list[str]:
    """Returns a line with the rank order of the best combination, or no line if the ranks keep the
    order of the topology."""
    placement = done.found[0].placement
    if placement is None:
        return []
    more = " ..." if len(placement) > _RANKS else ""
    return ["ranks 0, 1, ... are: " + " ".join(map(str, placement[:_RANKS])) + more]


def document(task: SimulationRequest, done: Search, bound: float) -> dict[str, Any]:
    """Returns the best combination of each algorithm as JSON, the fastest first."""
    ranks = task.topology.num_ranks
    return {
        "op": task.op,
        "topology": task.topology.name,
        "ranks": ranks,
        "nbytes": task.nbytes,
        "bound_s": bound,
        "simulated": done.simulated,
        "left_out_by_bytes": done.pruned,
        "not_tried": done.late,
        "found": [
            {
                **comparison.row(task, found.entry, ranks),
                "order": found.order,
                "placement": None if found.placement is None else list(found.placement),
            }
            for found in done.found
        ],
    }
