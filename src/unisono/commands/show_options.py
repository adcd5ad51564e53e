"""The options of `unisono show`. This module is fast to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unisono.commands.outputs import JsonOption, given, writable
from unisono.config import MOST_RANKS
from unisono.types import Op

_PIPELINE_OPTIONS = {
    "microbatches": "--microbatches",
    "vpp": "--vpp",
    "forward": "--forward",
    "backward": "--backward",
    "activation": "--activation",
}
"""Options that only a pipeline schedule reads."""
_ALGORITHM_OPTIONS = {
    "root": "--root",
    "size": "--size",
    "every": "--all",
    "layout": "--layout",
    "html_path": "--html",
    "launch": "--open",
}
"""Options that a pipeline schedule does not read."""
_DRAWING_OPTIONS = {
    "root": "--root",
    "every": "--all",
    "layout": "--layout",
    "svg_path": "--svg",
    "html_path": "--html",
    "files": "--files",
    "launch": "--open",
}
"""Options that have no effect on a list of algorithms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """The options of `unisono show`, as given on the command line."""

    what: Annotated[
        str,
        typer.Argument(
            metavar="OPERATION|PIPELINE|FILE",
            help=(
                "An operation such as all_reduce, a pipeline schedule such as 1f1b, or a JSON file."
            ),
        ),
    ]
    algorithm: Annotated[
        str | None, typer.Argument(help="Such as ring; without it, all algorithms are listed.")
    ] = None
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks", "-n", min=1, max=MOST_RANKS, help=("Number of ranks of the schedule.")
        ),
    ] = 8
    root: Annotated[int, typer.Option(help="Root of broadcast, reduce, gather, scatter.")] = 0
    size: Annotated[
        str | None,
        typer.Option(
            help=("Size of a rank's larger buffer, such as 64M; amounts are then in bytes.")
        ),
    ] = None
    every: Annotated[bool, typer.Option("--all", help="Print all rounds and transfers.")] = False
    layout: Annotated[str, typer.Option(help="Place ranks on a circle, grid or line.")] = "auto"
    svg_path: Annotated[
        Path | None,
        typer.Option("--svg", callback=writable, metavar="FILE", help="Write only this picture."),
    ] = None
    html_path: Annotated[
        Path | None,
        typer.Option("--html", callback=writable, metavar="FILE", help="Write only this page."),
    ] = None
    files: Annotated[
        bool, typer.Option("--files/--no-files", help="Write a picture and a page, or no files.")
    ] = True
    launch: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False
    microbatches: Annotated[
        int, typer.Option(min=1, help="Number of microbatches of a pipeline.")
    ] = 8
    vpp: Annotated[int, typer.Option(min=1, help="Stages per rank: 1f1b, gpipe, interleaved.")] = 1
    forward: Annotated[
        str, typer.Option(metavar="TIME", help="Forward time of a microbatch on a rank.")
    ] = "1ms"
    backward: Annotated[
        str, typer.Option(metavar="TIME", help="Backward time of a microbatch on a rank.")
    ] = "2ms"
    activation: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes from a stage to the next, and back.")
    ] = "0"
    json_path: JsonOption = None

    @property
    def is_pipeline(self) -> bool:
        """True if `what` is the name of a pipeline schedule."""
        from unisono.pipeline import SCHEDULES

        return self.what in SCHEDULES

    def check(self, context: typer.Context) -> None:
        """Raises BadParameter for options that have no effect."""
        _refuse(context, self._unread())

    def check_pipeline(self, context: typer.Context) -> None:
        """Raises BadParameter for options that have no effect on a pipeline schedule."""
        unread = [(_ALGORITHM_OPTIONS, "does not apply to a pipeline schedule")]
        from unisono.pipeline import SCHEDULES

        if self.what in SCHEDULES and SCHEDULES[self.what].is_v:
            unread.append(({"vpp": "--vpp"}, f"{self.what} always has two stages per rank"))
        _refuse(context, unread)
        if self.algorithm is not None:
            raise typer.BadParameter(f"a pipeline schedule has no algorithm {self.algorithm}")

    def _unread(self) -> list[tuple[dict[str, str], str]]:
        """Returns groups of options that have no effect, each with the reason. A group maps the
        names of options to their flags, such as `ranks` to `-n`."""
        what = self.what
        unread: list[tuple[dict[str, str], str]] = []
        if self.is_pipeline:
            return []
        unread.append((_PIPELINE_OPTIONS, "needs a pipeline schedule, as in unisono show 1f1b"))
        if what not in list(Op):
            flags = {"ranks": "-n", "root": "--root"}
            unread.append((flags, "the schedule in a file defines its own"))
        elif self.algorithm is None:
            unread.append((_DRAWING_OPTIONS, f"needs an algorithm, as in unisono show {what} ring"))
        elif not Op(what).rooted:
            unread.append(({"root": "--root"}, f"{what} has no root"))
        if not (self.files or self.svg_path or self.html_path):
            flags = {"layout": "--layout", "launch": "--open"}
            unread.append((flags, "needs a drawing, but --no-files disables them"))
        return unread


def _refuse(context: typer.Context, unread: list[tuple[dict[str, str], str]]) -> None:
    for names, why in unread:
        for name, option in names.items():
            if given(context, name):
                raise typer.BadParameter(f"{option}: {why}")
