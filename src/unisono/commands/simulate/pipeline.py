"""Simulates the file of a pipeline schedule. Returns a table, JSON and pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.commands.simulate.simulation_request import Output, model_lines, read_conditions

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.commands.simulate.options import SimulateOptions
    from unisono.pipeline import PipelineSchedule, PipelineSimulation, TaskRun

_BINS = 192


def run(options: SimulateOptions) -> Output:
    """Simulates the schedule of a file on a network. Raises ValueError for another file."""
    from unisono.pipeline import PipelineSchedule, simulate_pipeline
    from unisono.topology import load

    schedule = PipelineSchedule.load(options.op)
    topology = load(options.topology_spec)
    conditions = read_conditions(options, topology)
    bins = 0 if options.heat_path is None else _BINS
    done = simulate_pipeline(schedule, topology, conditions=conditions, bins=bins)
    return Output(
        table=table(schedule, done),
        document=document(schedule, done),
        lines=model_lines(conditions) + lines(done),
        files=list(pictures(options, schedule, done)),
    )


def table(schedule: PipelineSchedule, done: PipelineSimulation) -> Table:
    """Returns the times and bytes of each rank as a table."""
    from rich.table import Table

    from unisono.show import bytes_text, time_text

    title = f"{schedule.name}: {len(schedule.stages)} stages, {schedule.microbatches} microbatches"
    found = Table(title=f"{title}, on {done.result.topology.name}", title_justify="left")
    for name in ("rank", "stages", "computes", "waits", "sends"):
        found.add_column(name, justify="right")
    for rank, order in enumerate(schedule.ranks):
        busy_s = done.run.busy_s[rank]
        found.add_row(
            str(rank),
            " ".join(map(str, sorted({task.stage for group in order for task in group}))),
            time_text(busy_s),
            time_text(done.run.makespan_s - busy_s),
            bytes_text(_sent_bytes(done, rank)),
        )
    return found


def lines(done: PipelineSimulation) -> list[str]:
    """Returns lines with the step time, the bubble and the busiest link."""
    from unisono.show import time_text

    run, ideal = done.run, done.ideal
    found = [
        f"step {time_text(run.makespan_s)}, bubble {run.bubble:.1%}",
        f"if messages took no time: step {time_text(ideal.makespan_s)}, bubble {ideal.bubble:.1%}",
        f"exposed messages: {time_text(done.exposed_s)}",
    ]
    link = done.result.busiest_link
    if link >= 0 and done.result.link_bytes[link]:
        name, usage = done.result.link_name(link), done.result.utilisation[link]
        found.append(f"busiest link: {name}, usage {usage:.0%}")
    return found


def document(schedule: PipelineSchedule, done: PipelineSimulation) -> dict[str, Any]:
    """Returns the step, its bubble and the times of all passes as JSON."""
    return {
        "pipeline": schedule.name,
        "topology": done.result.topology.name,
        "stages": len(schedule.stages),
        "microbatches": schedule.microbatches,
        "step_s": done.run.makespan_s,
        "bubble": done.run.bubble,
        "ideal_step_s": done.ideal.makespan_s,
        "ideal_bubble": done.ideal.bubble,
        "exposed_s": done.exposed_s,
        "sent_bytes": [_sent_bytes(done, rank) for rank in range(len(schedule.ranks))],
        "ranks": _passes(done.run),
    }


def pictures(
    options: SimulateOptions, schedule: PipelineSchedule, done: PipelineSimulation
) -> Iterator[tuple[Path, str]]:
    """Yields the requested pictures and trace, as (path, contents)."""
    from unisono.pipeline import task_svg
    from unisono.show import link_heat_map
    from unisono.simulator import to_chrome_trace

    title = f"{schedule.name} on {done.result.topology.name}"
    if options.svg_path is not None:
        yield (
            options.svg_path,
            task_svg({title: done.run, f"{schedule.name}, no time for messages": done.ideal}),
        )
    if options.heat_path is not None:
        yield options.heat_path, link_heat_map(done.result, title)
    if options.trace_path is not None:
        yield options.trace_path, to_chrome_trace(done.result)


def _passes(run: TaskRun) -> list[list[dict[str, Any]]]:
    return [
        [{"pass": span.task.text, "begin_s": span.begin_s, "end_s": span.end_s} for span in row]
        for row in run.spans
    ]


def _sent_bytes(done: PipelineSimulation, rank: int) -> int:
    steps = done.result.steps
    rows = steps.messages()
    return round(float(np.sum(steps.bytes[rows][steps.src[rows] == rank])))
