"""The options of `unisono plan`. This module is fast to import."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from unisono.commands.outputs import JsonOption, writable


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `unisono plan`, as given on the command line."""

    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILES",
            help="With --calibrate: output of nccl-tests, JSON of `unisono bench`, or own step "
            "times (JSON or CSV).",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="A name, such as gpt3-175b, llama3-70b or dlrm-mlperf; or a Hugging Face "
            "config.json."
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(help="DEVICE:COUNT, such as a100:1024 or h100:64; or a .json file."),
    ] = None
    topology: Annotated[
        str | None,
        typer.Option(
            help="The whole network, whose ranks are the devices: torus:8x8, dgx:8/fat_tree:k=4 or "
            "a file. Exchanges are then simulated."
        ),
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(help="Sequences (dlrm-...: samples) of a step, over all devices."),
    ] = None
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; by default 2048.", show_default=False)
    ] = None
    micro_batch: Annotated[
        int | None,
        typer.Option(help="Sequences of a microbatch; by default the fastest that fits."),
    ] = None
    precision: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16, fp8 or fp4.")] = "bf16"
    recompute: Annotated[
        str | None,
        typer.Option(help="none, selective or full; by default the fastest that fits."),
    ] = None
    software: Annotated[
        str | None,
        typer.Option(
            help="The training software, such as megatron-2021, transformer-engine or torch-eager; "
            "by default current software: torch-fsdp for ZeRO-2 and 3, else transformer-engine."
        ),
    ] = None
    layout: Annotated[
        str | None,
        typer.Option(help="Predict this layout: dp=16,tp=8,pp=8,zero=1; or a .json file."),
    ] = None
    placement: Annotated[
        str | None,
        typer.Option(
            help="dlrm-...: predict this placement of tables: auto, table, row, column or "
            "replicated."
        ),
    ] = None
    table_update: Annotated[
        str,
        typer.Option(
            help="dlrm-...: rows (only the rows of a step's ids, row-wise Adagrad) or dense (whole "
            "tables, Adam)."
        ),
    ] = "rows"
    objective: Annotated[
        str,
        typer.Option(
            help="What to minimise: time, cost (time x devices), devices, or memory. cost and "
            "devices also try parts of the cluster."
        ),
    ] = "time"
    longest_s: Annotated[
        float | None,
        typer.Option("--longest", metavar="SECONDS", help="Longest step that is accepted."),
    ] = None
    keep: Annotated[int, typer.Option(min=1, help="Number of layouts to print.")] = 10
    explain: Annotated[bool, typer.Option("--explain", help="Print the time as a tree.")] = False
    save_path: Annotated[
        Path | None,
        typer.Option(
            "--save",
            callback=writable,
            metavar="FILE",
            help="Write the best layout to this file; with --calibrate, the calibration "
            "(by default calibration.json).",
        ),
    ] = None
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Make a calibration from FILES of own measurements."),
    ] = False
    calibration: Annotated[
        str | None, typer.Option(metavar="FILE", help="Use a file of --calibrate.")
    ] = None
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto",
            help="Print the layouts that no other one beats in time, devices and memory together.",
        ),
    ] = False
    plot_path: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            callback=writable,
            metavar="FILE",
            help="Draw the layouts' four walls: memory, performance, communication, tuning; or "
            "--pareto (PNG or SVG).",
        ),
    ] = None
    scaling: Annotated[
        bool,
        typer.Option("--scaling", help="Print the fastest layout of each part of the cluster."),
    ] = False
    weak: Annotated[
        bool,
        typer.Option("--weak", help="With --scaling: the batch grows with the devices."),
    ] = False
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity", help="Print which rate of the machine shortens the best layout most."
        ),
    ] = False
    tokens: Annotated[
        float | None,
        typer.Option(help="Print time, energy and cost of training on so many tokens."),
    ] = None
    price: Annotated[
        float | None, typer.Option(help="Price of a device for an hour, for --tokens.")
    ] = None
    watts: Annotated[
        float | None,
        typer.Option(help="Power of a device, for --tokens; by default that of its data sheet."),
    ] = None
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints", help="Print the best interval between checkpoints, and the goodput."
        ),
    ] = False
    failure_hours: Annotated[
        float | None,
        typer.Option(
            help="Mean hours between failures of one device, for --checkpoints; by default those "
            "of Llama 3's training, 50,681."
        ),
    ] = None
    storage: Annotated[
        float | None,
        typer.Option(
            metavar="BYTES/S",
            help="Rate of the storage, for --checkpoints; by default 2e9 for each host.",
        ),
    ] = None
    json_path: JsonOption = None

    def check(self) -> None:
        """Raises ValueError for options that cannot be combined."""
        if self.files and not self.calibrate:
            raise ValueError("FILES need --calibrate")
        if self.calibrate and not self.files:
            raise ValueError("--calibrate needs FILES: collectives or own step times")
        if self.plot_path is not None and (self.scaling or self.calibrate):
            raise ValueError("--plot does not draw --scaling or --calibrate")
        self._check_alone("calibrate", "files", "cluster", "topology", "save_path", "json_path")
        self._check_needs()
        self._check_searches()
        if not self.calibrate and None in (self.model, self.cluster, self.batch):
            raise ValueError("--model, --cluster and --batch are needed (or --calibrate)")

    def _check_alone(self, mode: str, *others: str) -> None:
        """Raises ValueError for options that a mode would ignore."""
        if not getattr(self, mode):
            return
        ignored = [name for name in self._stated() if name not in (mode, *others)]
        if ignored:
            raise ValueError(f"--{mode} does not go with {', '.join(map(_flag, ignored))}")

    def _check_needs(self) -> None:
        if self.weak and not self.scaling:
            raise ValueError("--weak needs --scaling")
        if self.tokens is None and (self.price is not None or self.watts is not None):
            raise ValueError("--price and --watts need --tokens")
        if not self.checkpoints and (self.failure_hours is not None or self.storage is not None):
            raise ValueError("--failure-hours and --storage need --checkpoints")

    def _check_searches(self) -> None:
        """Raises ValueError for options of a search without one, and for two searches."""
        of_search = [name for name in self._stated() if name in _OF_SEARCH]
        if self.layout is not None and (self.pareto or self.scaling):
            raise ValueError("--pareto and --scaling search all layouts; leave --layout out")
        for mode in ("layout", "placement", "pareto", "scaling"):
            if getattr(self, mode) and of_search:
                flags = ", ".join(map(_flag, of_search))
                raise ValueError(f"{flags}: of a search for the best layouts; leave --{mode} out")
        if self.pareto and self.scaling:
            raise ValueError("--pareto and --scaling are two outputs; state one of them")
        if self.save_path is not None and (self.pareto or self.scaling):
            raise ValueError("--save writes one layout; leave --pareto and --scaling out")
        single = self.explain or self.sensitivity or self.checkpoints or self.tokens is not None
        if single and (self.pareto or self.scaling):
            raise ValueError(
                "--explain, --tokens, --checkpoints and --sensitivity are of one layout, so they "
                "do not go with --pareto or --scaling"
            )

    def _stated(self) -> list[str]:
        """Returns the names of the options whose values differ from the defaults."""
        return [
            each.name for each in fields(self) if getattr(self, each.name) not in (each.default, [])
        ]


_OF_SEARCH = ("objective", "longest_s", "keep")


def _flag(name: str) -> str:
    """Returns the text of an option on the command line."""
    short = name.removesuffix("_path").removesuffix("_s")
    return "FILES" if name == "files" else f"--{short.replace('_', '-')}"
