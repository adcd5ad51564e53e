"""The command `unisono train`: trains a real model on alternating backends and compares them."""

from __future__ import annotations

import importlib.util
import math
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console

from unisono.commands.outputs import JsonOption, result_console, write_json
from unisono.config import MOST_RANKS
from unisono.errors import UnisonoError
from unisono.train import Outcome, Report, Run, TaskName, launch, shown

app = typer.Typer(
    help="Train a small real model on local ranks, on alternating backends, and compare.",
    no_args_is_help=True,
)

_DIGITS_EPOCHS = 25
_TEXT_STEPS = 600
_TEXT_STEPS_PER_PERIOD = 50

Ranks = Annotated[
    int,
    typer.Option("--ranks", "-n", min=1, max=MOST_RANKS, help=("Number of ranks on this machine.")),
]
Backends = Annotated[str, typer.Option(help="Backends of torch.distributed, separated by commas.")]
Seed = Annotated[
    int, typer.Option(min=0, help=("Seed of the model, the order and the augmentation."))
]
Batch = Annotated[int, typer.Option(min=1, help="Samples per rank and step.")]
LearningRate = Annotated[
    float, typer.Option(min=0.0, help=("The highest learning rate of the schedule."))
]


@app.command(epilog="Example: unisono train digits -n 4 --backends unisono,gloo --json out.json")
def digits(
    *,
    ranks: Ranks = 4,
    backends: Backends = "unisono,gloo",
    epochs: Annotated[int, typer.Option(min=1)] = _DIGITS_EPOCHS,
    batch: Batch = 16,
    learning_rate: LearningRate = 0.1,
    seed: Seed = 0,
    json_path: JsonOption = None,
) -> None:
    """A convolutional network on scikit-learn's digits, with DistributedDataParallel.

    Fails if the backends' loss curves differ by more than rounding, or if the ranks end with
    different parameters. A run of the default length also fails below 97 % on unseen images.
    """
    run = Run(
        task="digits",
        backends=_names(backends),
        ranks=ranks,
        seed=seed,
        batch=batch,
        periods=epochs,
        learning_rate=learning_rate,
    )
    _compare(run, json_path, is_default_length=epochs >= _DIGITS_EPOCHS)


@app.command(epilog="Example: unisono train text -n 2 --backends unisono --steps 1000")
def text(
    *,
    ranks: Ranks = 4,
    backends: Backends = "unisono,gloo",
    steps: Annotated[
        int, typer.Option(min=1, help="Above 50: rounded up to a multiple of 50.")
    ] = _TEXT_STEPS,
    batch: Batch = 2,
    learning_rate: LearningRate = 2e-3,
    seed: Seed = 0,
    json_path: JsonOption = None,
) -> None:
    """A byte-level transformer on the source of Python's own library, with the same loop.

    The loss is in bits per byte. At the end the model writes a piece of Python code.
    """
    steps_per_period = min(steps, _TEXT_STEPS_PER_PERIOD)
    run = Run(
        task="text",
        backends=_names(backends),
        ranks=ranks,
        seed=seed,
        batch=batch,
        periods=math.ceil(steps / steps_per_period),
        steps_per_period=steps_per_period,
        learning_rate=learning_rate,
    )
    _compare(run, json_path, is_default_length=steps >= _TEXT_STEPS)


def _names(backends: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in backends.split(",") if name.strip())
    if not names or len(set(names)) < len(names):
        raise typer.BadParameter(f"expected different backends, got {backends!r}")
    return names


def _compare(run: Run, json_path: str | None, *, is_default_length: bool) -> None:
    needed: dict[TaskName, tuple[str, ...]] = {"digits": ("torch", "sklearn"), "text": ("torch",)}
    missing = [name for name in needed[run.task] if importlib.util.find_spec(name) is None]
    progress_console = Console(stderr=True)
    if missing:
        progress_console.print(f"[red]needs {' and '.join(missing)}: install unisono\\[train]")
        raise typer.Exit(2)
    try:
        outcomes = _train(run, progress_console)
    except UnisonoError as error:
        progress_console.print(
            str(error), markup=False, highlight=False, style="red", soft_wrap=True
        )
        raise typer.Exit(1) from None
    report = Report(outcomes=outcomes, is_default_length=is_default_length)
    _print(report, result_console(json_path))
    write_json(report.as_json(), json_path)
    if report.failures:
        raise typer.Exit(1)


def _train(run: Run, console: Console) -> tuple[Outcome, ...]:
    # A plain SIGTERM would end this process without its ranks and their folder.
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
