"""The options of `unisono simulate`. This module is fast to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unisono.commands.outputs import JsonOption, given, writable
from unisono.types import Op

_OPERATION_OPTIONS = {
    "size": "--size",
    "names": "--compare",
    "levels": "--levels",
    "sizes": "--sizes",
    "sweep": "--sweep",
    "compute": "--compute",
    "search": "--search",
    "budget": "--budget",
    "in_network": "--in-network",
}
"""Options that have no effect on a pipeline schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The options of `unisono simulate`, as given on the command line."""

    op: Annotated[
        str,
        typer.Argument(
            metavar="OPERATION|FILE", help="Such as all_reduce, or a pipeline schedule's JSON file."
        ),
    ]
    algorithm: Annotated[
        str | None, typer.Argument(help="Such as ring; by default those of --compare.")
    ] = None
    topology_spec: Annotated[
        str,
        typer.Option(
            "--topology", "-t", metavar="SPEC|FILE", help=("Network, as for `unisono topo`.")
        ),
    ]
    size: Annotated[str, typer.Option(help="N: bytes of a rank's whole vector.")] = "64M"
    names: Annotated[
        str,
        typer.Option(
            "--compare", metavar="all|NAMES", help=("Algorithms, separated by semicolons.")
        ),
    ] = "all"
    levels: Annotated[
        str | None, typer.Option(metavar="4x8", help="Sizes of groups, innermost first.")
    ] = None
    sizes: Annotated[str, typer.Option(help="Sizes for the picture of --svg.")] = "1K:1G:x8"
    svg_path: Annotated[
        Path | None,
        typer.Option(
            "--svg",
            callback=writable,
            metavar="FILE",
            help="Draw times over sizes, or the passes of a pipeline.",
        ),
    ] = None
    heat_path: Annotated[
        Path | None,
        typer.Option(
            "--heat", callback=writable, metavar="FILE", help=("Draw link traffic over time (SVG).")
        ),
    ] = None
    trace_path: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            callback=writable,
            metavar="FILE",
            help=("Write a trace for Perfetto or Chrome."),
        ),
    ] = None
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Vary ranks, hosts, bandwidth, or an option of the network.",
        ),
    ] = None
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help=("Computation per step, such as 10ms; adds scale factors to --sweep."),
        ),
    ] = None
    search: Annotated[
        bool, typer.Option("--search", help="Also try numbers of channels and orders of ranks.")
    ] = False
    budget: Annotated[
        float, typer.Option(min=0, help="Seconds for --search, or for comparing all algorithms.")
    ] = 60.0
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="FILE", help=("Link models of `unisono calibrate`, or measurements.")
        ),
    ] = None
    overhead: Annotated[
        float, typer.Option(help="Seconds before each message leaves its rank.")
    ] = 0.0
    failed: Annotated[
        str,
        typer.Option(
            metavar="LINK,...",
            help="Failed directed links: ids, or 0-1 for all from node 0 to node 1.",
        ),
    ] = ""
    degraded: Annotated[
        str,
        typer.Option(
            metavar="LINK=PART,...",
            help=("Slow links with the remaining fraction of their rate, such as 0-1=0.5."),
        ),
    ] = ""
    in_network: Annotated[
        bool, typer.Option("--in-network", help="Let capable switches reduce and copy.")
    ] = False
    paths: Annotated[int, typer.Option(min=1, help="Paths over which each message is spread.")] = 1
    seed: Annotated[int, typer.Option(help="Seed of the choice among equal paths.")] = 0
    json_path: JsonOption = None

    @property
    def is_pipeline(self) -> bool:
        """True if the file of a pipeline schedule is simulated, not an operation."""
        return self.op.endswith(".json")

    def check(self, context: typer.Context) -> None:
        """Raises ValueError for options that exclude each other or have no effect."""
        if self.is_pipeline:
            self._refuse_in_pipelines(context)
            self._refuse_exclusive()
            return
        if self.op not in list(Op):
            raise ValueError(f"{self.op} is not one of the operations {', '.join(Op)}")
        if self.op == Op.BARRIER:
            raise ValueError("a barrier moves no data, so there is nothing to simulate")
        self._refuse_exclusive()
        self._refuse_unread(context)

    def _refuse_in_pipelines(self, context: typer.Context) -> None:
        if self.algorithm is not None:
            raise ValueError(f"{self.op} is a pipeline schedule; expected no {self.algorithm}")
        for name, option in _OPERATION_OPTIONS.items():
            if given(context, name):
                raise ValueError(f"{option} applies to operations, not to a pipeline schedule")

    def _refuse_exclusive(self) -> None:
        sweep, heat, trace = self.sweep is not None, self.heat_path, self.trace_path
        for path in (self.svg_path, heat):
            if path is not None and path.suffix != ".svg":
                raise ValueError(f"{path}: the file name must end in .svg")
        if sweep and self.search:
            raise ValueError("use either --sweep or --search, not both")
        if sweep and (heat is not None or trace is not None):
            raise ValueError(
                "--heat and --trace apply to one network, so they cannot be combined with --sweep"
            )
        if self.compute is not None and not sweep:
            raise ValueError("--compute needs --sweep")
        if self.search and self.svg_path is not None:
            raise ValueError("--search draws no chart; use --heat or --trace for its result")

    def _refuse_unread(self, context: typer.Context) -> None:
        if self.algorithm is not None and given(context, "names"):
            raise ValueError("--compare cannot be combined with a named algorithm")
        if given(context, "sizes") and (self.svg_path is None or self.sweep is not None):
            raise ValueError("--sizes needs --svg without --sweep")
        every = self.algorithm is None and self.names.strip() == "all"
        if given(context, "budget") and not (every or self.search):
            raise ValueError(
                "--budget needs --search or all algorithms; named algorithms have no limit"
            )
