"""The options of training runs with one layout, `unisono train TASK --layout ...`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from unisono.commands.outputs import JsonOption, writable, writable_folder
from unisono.config import MOST_RANKS
from unisono.pipeline import SCHEDULES
from unisono.planner import Layout

_SCHEDULE_NAMES = {"zero-bubble": "zb1p"}

Ranks = Annotated[
    int,
    typer.Option("--ranks", "-n", min=1, max=MOST_RANKS, help="Number of ranks on this machine."),
]
Seed = Annotated[
    int, typer.Option(min=0, help="Seed of the model, the order and the augmentation.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutOptions:
    """The options of a training task that can run with a parallel layout."""

    ranks: Ranks = 4
    seed: Seed = 0
    json_path: JsonOption = None
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="AXES|FILE",
            help="Train with one layout: axes such as dp=2,tp=2,pp=2, or a file of `unisono plan "
            "--save`. Default: dp = the number of ranks.",
        ),
    ] = None
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage.")] = None
    schedule: Annotated[
        str | None,
        typer.Option(help=f"Pipeline schedule: {', '.join(SCHEDULES)}; zero-bubble is zb1p."),
    ] = None
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a step.")] = 1
    global_batch: Annotated[
        int, typer.Option(min=1, help="Samples of a step, of all ranks together.")
    ] = 16
    dtype: Annotated[Literal["float32", "float64"], typer.Option(help="Element type.")] = "float32"
    tensor: Annotated[
        Literal["1d", "2d", "2.5d", "3d"] | None,
        typer.Option(
            help="Kind of tensor parallelism: over a line of tp ranks, planes of q x q, or a cube."
        ),
    ] = None
    exchange: Annotated[
        Literal["ring", "ulysses", "allgather"],
        typer.Option("--context", help="How ranks of cp exchange keys and values."),
    ] = "ring"
    dropout: Annotated[
        float,
        typer.Option(min=0.0, max=0.99, help="Probability that a transformer drops a value."),
    ] = 0.0
    clip: Annotated[
        float | None, typer.Option(min=0.0, help="Largest norm of all gradients together.")
    ] = None
    schedule_plot: Annotated[
        Path | None,
        typer.Option(help="Draw the passes of the last step, predicted and measured: PNG or SVG."),
    ] = None
    schedule_json: Annotated[
        Path | None,
        typer.Option(
            callback=writable,
            help="Write the pipeline schedule, with measured times, for `unisono simulate`.",
        ),
    ] = None
    predict: Annotated[
        bool,
        typer.Option("--predict", help="Profile the model first, and predict the time of a step."),
    ] = False
    save: Annotated[
        Path | None,
        typer.Option(
            callback=writable_folder, help="Write a checkpoint to this folder at the end."
        ),
    ] = None
    load: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Begin with this checkpoint, of any layout."
        ),
    ] = None

    def read_layout(self) -> Layout:
        """Returns the layout that the options describe. Raises a usage error if the layout is
        invalid."""
        try:
            if self.layout is None:
                layout = Layout(dp=self.ranks)
            elif Path(self.layout).is_file() or self.layout.endswith(".json"):
                layout = Layout.load(self.layout)
            else:
                layout = Layout.parse(self.layout)
            zero = layout.zero if self.zero is None else self.zero
            schedule = self.schedule or layout.schedule
            return replace(
                layout,
                zero=zero,
                schedule=_SCHEDULE_NAMES.get(schedule, schedule),
                tensor=self.tensor or layout.tensor,
            )
        except (ValueError, OSError) as error:
            raise typer.BadParameter(f"--layout: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutTaskOptions(LayoutOptions):
    """The options of a training task that always runs with one layout."""

    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 20
    learning_rate: Annotated[float, typer.Option(min=0.0, help="The learning rate.")] = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class ClickOptions(LayoutTaskOptions):
    """The options of `unisono train dlrm`."""

    global_batch: Annotated[
        int, typer.Option(min=1, help="Samples of a step, of all ranks together.")
    ] = 256
    learning_rate: Annotated[float, typer.Option(min=0.0, help="The learning rate.")] = 0.02
    placement: Annotated[
        Literal["auto", "table", "row", "column", "replicated"],
        typer.Option(help="How ranks divide the embedding tables; auto: by a cost model."),
    ] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertOptions(LayoutTaskOptions):
    """The options of `unisono train moe`."""

    capacity_factor: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Most tokens that an expert takes of a sequence, over its mean load; "
            "default: all of them.",
        ),
    ] = None


LAYOUT_ONLY = (
    "layout",
    "zero",
    "schedule",
    "microbatches",
    "global_batch",
    "dtype",
    "tensor",
    "exchange",
    "dropout",
    "clip",
    "schedule_plot",
    "schedule_json",
    "predict",
    "save",
    "load",
)
"""Names of options that are valid only with `--layout`, for tasks that also run without a
layout."""
