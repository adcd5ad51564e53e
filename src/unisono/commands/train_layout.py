"""Training runs with one parallel layout, for tasks of `unisono train` with `--layout`."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console

from unisono.commands.command_options import with_options
from unisono.commands.outputs import progress, result_console, write_json
from unisono.commands.train_layout_options import (
    ClickOptions,
    ExpertOptions,
    LayoutOptions,
    LayoutTaskOptions,
)
from unisono.commands.train_packages import require_packages
from unisono.errors import UnisonoError
from unisono.pipeline import PipelineSchedule
from unisono.train import (
    Event,
    LayoutRun,
    LayoutTask,
    Stepped,
    figures_table,
    launch_layout,
    loss_line,
    save_passes_plot,
    tables_table,
    time_line,
    title,
)


def train_one_layout(
    task: LayoutTask,
    options: LayoutOptions,
    *,
    steps: int,
    learning_rate: float,
    placement: str = "auto",
    capacity_factor: float | None = None,
) -> None:
    """Trains a task with one layout and prints the results. Exits with code 1 if the training
    fails."""
    if options.dropout and task in ("digits", "dlrm"):
        raise typer.BadParameter(f"--dropout is for transformers; the model of {task} has none")
    layout = options.read_layout()
    if options.schedule_json is not None and layout.pp == 1:
        raise typer.BadParameter("--schedule-json needs a pipeline, such as --layout pp=2")
    require_packages(task)
    console, errors = result_console(options.json_path), Console(stderr=True)
    try:
        run = LayoutRun(
            task=task,
            ranks=options.ranks,
            layout=layout,
            steps=steps,
            batch=options.global_batch,
            microbatches=options.microbatches,
            learning_rate=learning_rate,
            clip=options.clip,
            seed=options.seed,
            dtype=options.dtype,
            context=options.exchange,
            dropout=options.dropout,
            capacity_factor=capacity_factor,
            placement=placement,
            tells_passes=options.schedule_plot is not None,
            tells_schedule=options.schedule_json is not None,
            predicts=options.predict,
            save=str(options.save.resolve()) if options.save else None,
            load=str(options.load.resolve()) if options.load else None,
        )
        result = _followed(run)
    except (UnisonoError, ValueError) as error:
        errors.print(
            f"unisono: {error}", markup=False, highlight=False, style="red", soft_wrap=True
        )
        raise typer.Exit(1) from None
    console.print(title(run.task, run.layout.text(), result), style="bold", highlight=False)
    console.print(loss_line(result), highlight=False, soft_wrap=True)
    console.print(figures_table(result))
    if "tables" in result:
        console.print(tables_table(result))
    console.print(time_line(result), highlight=False)
    if options.schedule_plot is not None:
        save_passes_plot(result.pop("passes"), options.schedule_plot)
        console.print(f"wrote {options.schedule_plot}", highlight=False)
    if options.schedule_json is not None:
        PipelineSchedule.from_document(result.pop("schedule")).save(options.schedule_json)
        console.print(f"wrote {options.schedule_json}", highlight=False)
    write_json(result, options.json_path)


def _followed(run: LayoutRun) -> dict[str, Any]:
    """Runs a training and displays its progress. Returns the result."""
    with progress() as show:

        def listen(event: Event) -> None:
            if isinstance(event, Stepped):
                show(f"loss {event.loss:.4f}", event.step / run.steps)

        show(f"starting {run.ranks} ranks", 0.0)
        return launch_layout(run, listen)


@with_options(ExpertOptions)
def moe(context: typer.Context, options: ExpertOptions) -> None:
    """A transformer with eight experts in each layer, on the source of Python's library."""
    train_one_layout(
        "moe",
        options,
        steps=options.steps,
        learning_rate=options.learning_rate,
        capacity_factor=options.capacity_factor,
    )


@with_options(LayoutTaskOptions)
def long(context: typer.Context, options: LayoutTaskOptions) -> None:
    """A transformer on long windows of the source of Python's library: 1024 bytes."""
    train_one_layout("long", options, steps=options.steps, learning_rate=options.learning_rate)


@with_options(ClickOptions)
def dlrm(context: typer.Context, options: ClickOptions) -> None:
    """A recommendation model with twelve embedding tables, on click logs that it draws."""
    train_one_layout(
        "dlrm",
        options,
        steps=options.steps,
        learning_rate=options.learning_rate,
        placement=options.placement,
    )
