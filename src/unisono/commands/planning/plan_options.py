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
    like: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Predict the job of a file, then search for better layouts: a script with flags "
            "of Megatron-LM, options of a recipe of Megatron-Bridge, or a TOML of torchtitan. "
            "Other options replace what the file states.",
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
    states: Annotated[
        str,
        typer.Option(
            help="Formats of weights, gradients and optimizer: mixed (16 bits, float32 sums and "
            "states), bf16-gradients, or bf16 (all of them)."
        ),
    ] = "mixed"
    software: Annotated[
        str | None,
        typer.Option(
            help="The training software, such as megatron-2021, transformer-engine or torch-eager; "
            "by default current software: torch-fsdp for ZeRO-2 and 3, else transformer-engine."
        ),
    ] = None
    trainable: Annotated[
        str,
        typer.Option(
            help="Weights that are trained: all, or only adapters (LoRA): lora:16 on all linear "
            "layers, lora:16:attention on those of attention."
        ),
    ] = "all"
    document: Annotated[
        int | None,
        typer.Option(help="Mean tokens of the documents that are packed into a sequence."),
    ] = None
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep the optimizer states in the host's memory.")
    ] = False
    context_kind: Annotated[
        str, typer.Option("--context", help="Context parallelism: ring, ulysses or allgather.")
    ] = "ring"
    padding: Annotated[
        float, typer.Option(help="Share of the positions of a step that are padding.")
    ] = 0.0
    layout: Annotated[
        str | None,
        typer.Option(help="Predict this layout: dp=16,tp=8,pp=8,zero=1; or a .json file."),
    ] = None
    schedules: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Pipeline schedules to search: 1f1b, or several of 1f1b, gpipe, zb1p, zbv and "
            "dualpipev.",
        ),
    ] = "1f1b"
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
    headroom: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Share of a device's memory that layouts leave free if any layout does.",
        ),
    ] = 0.1
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
    days: Annotated[
        float | None,
        typer.Option(
            help="With --tokens: the fewest devices, of the cluster and its parts, that train in "
            "so many days."
        ),
    ] = None
    price: Annotated[
        float | None, typer.Option(help="Price of a device for an hour: prints costs.")
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
        self._check_alone("like", *_OF_LIKE)
        if self.like is not None and self.cluster is None:
            raise ValueError(
                "--like needs --cluster, such as h100:64, or h100 for the file's number"
            )
        modes = self.calibrate or self.like is not None
        if not modes and None in (self.model, self.cluster, self.batch):
            raise ValueError("--model, --cluster and --batch are needed (or --like or --calibrate)")

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
        for name in ("watts", "days"):
            if self.tokens is None and getattr(self, name) is not None:
                raise ValueError(f"--{name} needs --tokens")
        if self.days is not None and self.longest_s is not None:
            raise ValueError("--days and --longest both limit the step time; state one of them")
        if not self.checkpoints and (self.failure_hours is not None or self.storage is not None):
            raise ValueError("--failure-hours and --storage need --checkpoints")

    def _check_searches(self) -> None:
        """Raises ValueError for options of a search without one, and for two searches."""
        of_search = [name for name in self._stated() if name in _OF_SEARCH]
        no_search = (self.layout is not None and self.like is None) or self.pareto or self.scaling
        if self.schedules != "1f1b" and no_search:
            raise ValueError("--schedules needs a search; write schedule=zbv in --layout")
        if self.layout is not None and (self.pareto or self.scaling):
            raise ValueError("--pareto and --scaling search all layouts; leave --layout out")
        modes = ("placement", "pareto", "scaling", *(("layout",) if self.like is None else ()))
        for mode in modes:
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

    @property
    def wanted(self) -> str:
        """The quantity that a search minimises: `objective`, or with `days` the devices."""
        return "devices" if self.days is not None and self.objective == "time" else self.objective

    def longest_step_s(self, tokens: int) -> float | None:
        """Returns the longest step that is accepted, for steps of this number of tokens."""
        if self.days is None or self.tokens is None:
            return self.longest_s
        return self.days * 86400 * tokens / self.tokens

    def _stated(self) -> list[str]:
        """Returns the names of the options whose values differ from the defaults."""
        return [
            each.name for each in fields(self) if getattr(self, each.name) not in (each.default, [])
        ]


_OF_LIKE = (
    *("model", "cluster", "topology", "batch", "seq", "micro_batch", "precision", "recompute"),
    *(
        "trainable",
        "document",
        "padding",
        "software",
        "layout",
        "schedules",
        "headroom",
        "keep",
        "explain",
        "save_path",
        "calibration",
        "price",
    ),
    "json_path",
)
_OF_SEARCH = ("objective", "longest_s", "headroom", "keep", "days")


def _flag(name: str) -> str:
    """Returns the text of an option on the command line."""
    short = name.removesuffix("_path").removesuffix("_s").removesuffix("_kind")
    return "FILES" if name == "files" else f"--{short.replace('_', '-')}"
