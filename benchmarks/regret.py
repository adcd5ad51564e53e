"""Measures the regret: the time of the algorithm that is chosen by default, divided by the time of
the best algorithm.

For each cell of the sweep, all distinct algorithms alternate in one group of ranks. Fast algorithms
get more rounds. Then the default and the best algorithms run a final measurement with still more
rounds. A regret of 1 is perfect. The times that select the best algorithm are not used to compare
it, because a lucky time would count twice. So each half of the final rounds selects the best
algorithm, which the other half compares with the default.

    python benchmarks/regret.py                 # 70 cells in about four minutes
    python benchmarks/regret.py --ops broadcast --ranks 2 --budget 20
    python benchmarks/regret.py --fit           # constants of the cost model from the last results
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean, median
from time import monotonic
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from unisono import algorithms
from unisono.bench.algorithm_measurement import (
    MeasurementLength,
    distinct,
    measure_alternating,
    medians,
)
from unisono.bench.cases import Case
from unisono.bench.contestant_ranks import ContestantRanks
from unisono.bench.contestants import OURS, Contestant
from unisono.bench.core_latency import probe_core_latency_s
from unisono.bench.machine_facts import busy_cores, describe_machine
from unisono.bench.sizes import format_size, parse_sizes
from unisono.bench.tuner import default_algorithm
from unisono.commands.outputs import progress
from unisono.native import usable_cores
from unisono.selection.one_host_cost_model import Constants, predict, work
from unisono.types import Op

HERE = Path(__file__).parent
OPS = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast"
SIZES = "8,1K,16K,128K,1M,8M,64M"
CHANNELS = ("direct:channels=2", "direct:channels=4")
FINALISTS = 4
FINAL_ROUNDS = 14
OVERHEAD = 2.5
"""Ratio of a cell's time to that of its rounds."""


def measure(world: ContestantRanks, op: Op, nbytes: int, budget_s: float) -> dict[str, Any]:
    """Measures one cell. Returns the times of the first measurement (all algorithms) and of the
    final measurement (the default and the fastest ones), and the regret.
    """
    case = Case(op=op, ranks=world.ranks, nbytes=nbytes)
    default = default_algorithm(op, case.size_bytes, world.ranks)
    names = distinct(op, [default, *algorithms.names(op), *CHANNELS], world.ranks)
    first = medians(
        measure_alternating(
            world, case, names, MeasurementLength(rounds=3, budget_s=budget_s), keep=[default]
        )
    )
    best = sorted(first, key=lambda name: first[name])[:FINALISTS]
    finalists = list(dict.fromkeys([default, *best]))
    length = MeasurementLength(rounds=FINAL_ROUNDS, budget_s=budget_s)
    rounds_s = measure_alternating(world, case, finalists, length, keep=finalists)
    final = medians(rounds_s)
    return {
        "op": op,
        "ranks": world.ranks,
        "size_bytes": case.size_bytes,
        "default": default,
        "best": min(final, key=lambda name: final[name]),
        "regret": regret(rounds_s, default),
        "predicted_s": predict(op, default, world.ranks, case.size_bytes, cores=usable_cores()),
        "core_latency_s": probe_core_latency_s(),
        "final_s": final,
        "first_s": first,
        "candidates": names,
    }


def regret(rounds_s: dict[str, tuple[float, ...]], default: str) -> float:
    """Returns the default's time divided by the best algorithm's, at least 1. Each half of the
    rounds selects a best algorithm, which is compared with the default in the other half. The
    comparison is round by round, because the latency between cores may change.
    """
    ratios = []
    for chooses in (0, 1):
        best = min(rounds_s, key=lambda name: median(rounds_s[name][chooses::2]))
        judged = zip(
            rounds_s[default][1 - chooses :: 2], rounds_s[best][1 - chooses :: 2], strict=True
        )
        ratios.append(median(default_s / best_s for default_s, best_s in judged))
    return max(1.0, geometric_mean(ratios))


def render(cells: list[dict[str, Any]]) -> Table:
    table = Table(title="regret of the default choice", title_justify="left")
    for column in ("operation", "ranks", "size", "default", "best"):
        table.add_column(column, no_wrap=True)
    for column in ("default us", "best us", "regret", "predicted us", "candidates"):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in cells:
        times_s = cell["final_s"]
        table.add_row(
            *(cell["op"], str(cell["ranks"]), format_size(cell["size_bytes"])),
            *(cell["default"], cell["best"]),
            *(f"{times_s[cell[name]] * 1e6:.2f}" for name in ("default", "best")),
            *(f"{cell['regret']:.3f}", f"{cell['predicted_s'] * 1e6:.2f}"),
            str(len(cell["candidates"])),
        )
    return table


def fit(cells: list[dict[str, Any]]) -> tuple[Constants, float]:
    """Returns nonnegative constants with the least squared relative error, and the mean factor
    between prediction and measurement (1 is perfect).
    """
    rows, times = [], []
    for cell in cells:
        for name, time_s in (cell["first_s"] | cell["final_s"]).items():
            op, ranks, nbytes = Op(cell["op"]), cell["ranks"], cell["size_bytes"]
            does = work(op, name, ranks=ranks, cores=usable_cores())
            rows.append([*does[:3], does.written * nbytes, does.reduced * nbytes])
            times.append(time_s)
    matrix, wanted = np.array(rows), np.array(times)
    weighted = matrix / wanted[:, None]
    free = list(range(matrix.shape[1]))
    while True:  # removes constants that would be negative
        found = np.linalg.lstsq(weighted[:, free], np.ones(len(wanted)), rcond=None)[0]
        if (found >= 0).all():
            break
        free.remove(free[int(np.argmin(found))])
    values = np.zeros(matrix.shape[1])
    values[free] = found
    off = float(np.exp(np.abs(np.log((matrix @ values) / wanted)).mean()))
    call_s, round_s, switch_s, byte_s, reduced_s = (float(value) for value in values)
    constants = Constants(
        call_s=call_s, round_s=round_s, switch_s=switch_s, byte_s=byte_s, reduced_s=reduced_s
    )
    return constants, off


def main(
    *,
    ops: Annotated[str, typer.Option(help="Operations, separated by commas.")] = OPS,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Message sizes, as for unisono bench.")] = SIZES,
    budget: Annotated[
        float, typer.Option(help=("Approximate limit of the run, in seconds."))
    ] = 210.0,
    path: Annotated[Path, typer.Option(help="Results.")] = HERE / "results" / "regret.json",
    only_fit: Annotated[
        bool, typer.Option("--fit", help=("Only fit the constants, without measuring."))
    ] = False,
) -> None:
    console = Console(width=150)
    if only_fit:
        constants, off = fit(json.loads(path.read_text())["cells"])
        console.print(constants, f"mean error factor {off:.2f}")
        return
    machine = {**describe_machine(), "busy_cores": busy_cores()}
    wanted = [(Op(op), nbytes) for op in ops.split(",") for nbytes in parse_sizes(sizes)]
    counts = [int(count) for count in ranks.split(",")]
    cells: list[dict[str, Any]] = []
    end_s = monotonic() + budget
    with progress() as observe:
        for count in counts:
            with ContestantRanks(Contestant(name=OURS["native"]), count) as world:
                world.start()
                for op, nbytes in wanted:
                    left = len(counts) * len(wanted) - len(cells)
                    share_s = max(0.05, (end_s - monotonic()) / left / 2 / OVERHEAD)
                    label = f"{op} {format_size(nbytes)}, {count} ranks"
                    observe(label, 1 - left / len(counts) / len(wanted))
                    cells.append(measure(world, op, nbytes, share_s))
    regrets = [cell["regret"] for cell in cells]
    summary = {"geometric_mean": geometric_mean(regrets), "worst": max(regrets)}
    console.print(render(cells))
    console.print(f"regret: geometric mean {summary['geometric_mean']:.3f}, ", end="")
    console.print(f"worst {summary['worst']:.3f}")
    path.write_text(json.dumps({"machine": machine, **summary, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
