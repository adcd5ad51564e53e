"""The command `unisono train`. It trains a real model on several backends alternately and compares
them."""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from unisono.commands.command_options import with_options
from unisono.commands.outputs import JsonOption, given, result_console, write_json
from unisono.commands.train_layout import dlrm, long, moe, train_one_layout
from unisono.commands.train_layout_options import LAYOUT_ONLY, LayoutOptions, Ranks
from unisono.commands.train_packages import require_packages
from unisono.errors import UnisonoError
from unisono.train import (
    FULL_SCALE,
    Example,
    Outcome,
    Report,
    TrainingRun,
    hidden_line,
    launch,
    overlap_json,
    overlap_table,
    overlap_trace,
    run_overlap,
    shown,
)

app = typer.Typer(
    help="Train small models on local ranks and compare backends, or run an example of overlap.",
    no_args_is_help=True,
)

_DIGITS_EPOCHS = 25
_TEXT_STEPS = 600
_TEXT_STEPS_PER_PERIOD = 50

Backends = Annotated[str, typer.Option(help="Backends of torch.distributed, separated by commas.")]
With = Annotated[
    Literal["controller"] | None,
    typer.Option("--with", help="Also train through the controller, in the first column."),
]
Batch = Annotated[int, typer.Option(min=1, help="Samples per rank and step; without --layout.")]
LearningRate = Annotated[
    float, typer.Option(min=0.0, help="The highest learning rate of the schedule.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsOptions(LayoutOptions):
    """The options of `unisono train digits`."""

    backends: Backends = "unisono,gloo"
    with_: With = None
    epochs: Annotated[int, typer.Option(min=1, help="Without --layout.")] = _DIGITS_EPOCHS
    steps: Annotated[int, typer.Option(min=1, help="Number of steps; with --layout.")] = 20
    batch: Batch = 16
    learning_rate: LearningRate = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions(LayoutOptions):
    """The options of `unisono train text`."""

    backends: Backends = "unisono,gloo"
    with_: With = None
    steps: Annotated[
        int,
        typer.Option(min=1, help="Without --layout, above 50: rounded up to a multiple of 50."),
    ] = _TEXT_STEPS
    batch: Batch = 2
    learning_rate: LearningRate = 2e-3


@app.command(epilog="Example: unisono train digits -n 4 --backends unisono,gloo --json out.json")
@with_options(DigitsOptions)
def digits(context: typer.Context, options: DigitsOptions) -> None:
    """A convolutional network on scikit-learn's digits.

    Trains with DistributedDataParallel on each backend. Fails if the backends' loss curves differ
    by more than rounding, or if the ranks end with different parameters. A run of the default
    length also fails below 97 % on unseen images. With --layout, trains with that layout instead,
    and shows its losses, bytes, memory and bubble.
    """
    if _asks_for_layout(context):
        rate = options.learning_rate
        return train_one_layout("digits", options, steps=options.steps, learning_rate=rate)
    run = TrainingRun(
        task="digits",
        backends=_names(options.backends, options.with_),
        ranks=options.ranks,
        seed=options.seed,
        batch=options.batch,
        periods=options.epochs,
        learning_rate=options.learning_rate,
    )
    return _compare(run, options.json_path, is_default_length=options.epochs >= _DIGITS_EPOCHS)


@app.command(epilog="Example: unisono train text -n 8 --layout dp=2,tp=2,pp=2 --steps 20")
@with_options(TextOptions)
def text(context: typer.Context, options: TextOptions) -> None:
    """A byte-level transformer on the source of Python's own library.

    Trains with the same loop as digits. The loss is in bits per byte. At the end the model writes a
    piece of Python code. With --layout, trains a transformer that every axis can divide, with that
    layout; the loss is in nats per byte.
    """
    if _asks_for_layout(context):
        rate, steps = options.learning_rate, options.steps
        return train_one_layout("text", options, steps=steps, learning_rate=rate)
    steps_per_period = min(options.steps, _TEXT_STEPS_PER_PERIOD)
    run = TrainingRun(
        task="text",
        backends=_names(options.backends, options.with_),
        ranks=options.ranks,
        seed=options.seed,
        batch=options.batch,
        periods=math.ceil(options.steps / steps_per_period),
        steps_per_period=steps_per_period,
        learning_rate=options.learning_rate,
    )
    return _compare(run, options.json_path, is_default_length=options.steps >= _TEXT_STEPS)


app.command(epilog="Example: unisono train moe -n 4 --layout dp=4,ep=4")(moe)
app.command(epilog="Example: unisono train long -n 4 --layout cp=4 --context ring")(long)
app.command(epilog="Example: unisono train dlrm -n 4 --layout dp=4 --placement auto")(dlrm)


def _asks_for_layout(context: typer.Context) -> bool:
    return any(given(context, name) for name in LAYOUT_ONLY)


@app.command(epilog="Example: unisono train overlap -n 2 --seconds 2 --trace overlap.json")
def overlap(
    *,
    ranks: Ranks = 2,
    ratios: Annotated[
        str, typer.Option(help="Ratios of exchange time to computation time, separated by commas.")
    ] = "500,1",
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds of the serial step.")] = 4.0,
    latency_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Part of an exchange that is latency.")
    ] = 0.5,
    layers: Annotated[int, typer.Option(min=1)] = 96,
    per_layer: Annotated[int, typer.Option(min=1, help="Gradients of a layer.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each case.")] = 5,
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline for Perfetto to this file.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Overlap and fusion by example: 96 x 12 gradients over one link.

    Every case runs through the controller: serial, overlapped, fused, and both, with layers as
    buckets and with the best buckets. Waits stand for computation and link. Prints the predicted
    and the measured time of a step.
    """
    console, results = result_console(json_path), []
    for ratio in _ratios(ratios):
        example = Example.lasting(
            seconds, ratio=ratio, latency_share=latency_share, layers=layers, per_layer=per_layer
        )
        with Console(stderr=True).status(f"computation : exchange = 1 : {ratio:g}"):
            results.append(run_overlap(example, ranks=ranks, rounds=rounds))
        console.print(overlap_table(results[-1]))
        console.print(hidden_line(results[-1]), highlight=False)
    console.print(FULL_SCALE, style="dim", highlight=False)
    if trace is not None:
        trace.write_text(overlap_trace(results))
    write_json(overlap_json(results), json_path)


def _ratios(text: str) -> list[float]:
    try:
        ratios = [float(word) for word in text.split(",")]
    except ValueError:
        ratios = []
    if not ratios or not all(0 < ratio < math.inf for ratio in ratios):
        raise typer.BadParameter(f"--ratios: expected numbers above 0, got {text!r}")
    return ratios


def _names(backends: str, with_: str | None) -> tuple[str, ...]:
    named = [name.strip() for name in backends.split(",") if name.strip()]
    names = (*([with_] if with_ else []), *named)
    if not names or len(set(names)) < len(names):
        raise typer.BadParameter(f"expected different backends, got {backends!r}")
    return names


def _compare(run: TrainingRun, json_path: str | None, *, is_default_length: bool) -> None:
    require_packages(run.task)
    progress_console = Console(stderr=True)
    try:
        outcomes = _train(run, progress_console)
    except UnisonoError as error:
        progress_console.print(
            f"unisono: {error}", markup=False, highlight=False, style="red", soft_wrap=True
        )
        raise typer.Exit(1) from None
    report = Report(outcomes=outcomes, is_default_length=is_default_length)
    _print(report, result_console(json_path))
    write_json(report.as_json(), json_path)
    if report.failures:
        raise typer.Exit(1)


def _train(run: TrainingRun, console: Console) -> tuple[Outcome, ...]:
    # Without a handler, SIGTERM would end this process but not its ranks, and would not remove
    # their folder.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with shown(run, console) as listen:
        return tuple(Outcome(run=run, finished=finished) for finished in launch(run, listen))


def _print(report: Report, console: Console) -> None:
    sample = report.outcomes[0].finished.sample
    if sample:
        console.rule("written by the trained model")
        console.print(sample, markup=False, highlight=False)
        console.rule()
    console.print(report.title, style="bold", highlight=False)
    console.print(report.table())
    console.print(report.legend, style="dim", highlight=False)
    for agreement in report.agreements:
        if agreement.holds:
            console.print(f"[green]ok[/]: {agreement}", highlight=False)
    for failure in report.failures:
        console.print(f"[red]FAILED[/]: {failure}", highlight=False)
