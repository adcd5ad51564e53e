"""`unisono show` of a pipeline schedule: table, picture, and the JSON for `unisono simulate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from unisono.commands.outputs import STDOUT, print_written, result_console

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.commands.show_options import ShowOptions
    from unisono.pipeline import PipelineSchedule, TaskRun

_SHOWN_PASSES = 24


def find_pipeline(options: ShowOptions) -> PipelineSchedule | None:
    """Returns the requested pipeline schedule; None if the user asks for another kind of schedule.

    Raises `typer.BadParameter` for a pipeline schedule that cannot run.
    """
    from unisono.pipeline import PipelineSchedule

    try:
        if options.is_pipeline:
            return _build(options)
        path = Path(options.what)
        return PipelineSchedule.load(path) if _is_pipeline_file(path) else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def show_pipeline(schedule: PipelineSchedule, options: ShowOptions) -> None:
    """Prints and draws a pipeline schedule, and writes it as JSON."""
    from unisono.pipeline import run_tasks, task_svg
    from unisono.show import time_text

    run = run_tasks(schedule.ranks, schedule.seconds)
    console = result_console(options.json_path)
    console.print(_table(schedule, run))
    console.print(f"step {time_text(run.makespan_s)}, bubble {run.bubble:.1%}", highlight=False)
    path = options.svg_path
    if path is None and options.files:
        path = Path(f"{Path(options.what).stem}-{len(schedule.ranks)}.svg")
    if path is not None:
        path.write_text(task_svg({schedule.name: run}), encoding="utf-8")
        print_written(console, [path])
    if options.json_path == STDOUT:
        sys.stdout.write(schedule.to_json())
    elif options.json_path is not None:
        schedule.save(options.json_path)


def _build(options: ShowOptions) -> PipelineSchedule:
    from unisono.bench import parse_size
    from unisono.parallel import pipeline_schedule
    from unisono.planner import Layout
    from unisono.topology import seconds

    return pipeline_schedule(
        Layout(pp=options.ranks, vpp=options.vpp, schedule=options.what),
        microbatches=options.microbatches,
        forward_s=seconds(options.forward),
        backward_s=seconds(options.backward),
        activation_bytes=parse_size(options.activation),
    )


def _is_pipeline_file(path: Path) -> bool:
    """Returns True for a JSON object with the field "pipeline"."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # the reader of schedules of collectives reports the error
    return isinstance(document, dict) and "pipeline" in document


def _table(schedule: PipelineSchedule, run: TaskRun) -> Table:
    """Returns the first passes of each rank as a table."""
    from rich.table import Table

    found = Table(
        title=f"{schedule.name}: {len(schedule.stages)} stages, {schedule.microbatches} "
        "microbatches",
        title_justify="left",
        caption="stage, pass, microbatch; F forward, B backward, I input and W weight gradient",
    )
    for name in ("rank", "passes", "bubble"):
        found.add_column(name, justify="left" if name == "passes" else "right")
    for rank, order in enumerate(schedule.ranks):
        texts = [task.text for group in order for task in group]
        more = ["..."] if len(texts) > _SHOWN_PASSES else []
        waits = 1 - run.busy_s[rank] / run.makespan_s if run.makespan_s else 0.0
        found.add_row(str(rank), " ".join(texts[:_SHOWN_PASSES] + more), f"{waits:.1%}")
    return found
