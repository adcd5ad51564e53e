"""The command `unisono show`; fast to import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.commands.outputs import (
    JsonOption,
    given,
    progress,
    result_console,
    writable,
    write_json,
)
from unisono.config import MOST_RANKS

if TYPE_CHECKING:
    from unisono.schedule import Schedule
    from unisono.show import ScheduleView

_MOST_TRANSFERS = 1 << 18
"""Limit for drawing; more take over half a minute and are unreadable."""


def show(
    context: typer.Context,
    *,
    what: Annotated[
        str,
        typer.Argument(
            metavar="OPERATION|FILE",
            help=("An operation such as all_reduce, or a schedule's JSON file."),
        ),
    ],
    algorithm: Annotated[
        str | None, typer.Argument(help="Such as ring; without it, all algorithms are listed.")
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks", "-n", min=1, max=MOST_RANKS, help=("Number of ranks of the schedule.")
        ),
    ] = 8,
    root: Annotated[int, typer.Option(help="Root of broadcast, reduce, gather, scatter.")] = 0,
    size: Annotated[
        str | None,
        typer.Option(
            help=("Size of a rank's larger buffer, such as 64M; amounts are then in bytes.")
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print all rounds and transfers.")] = False,
    layout: Annotated[str, typer.Option(help="Place ranks on a circle, grid or line.")] = "auto",
    svg_path: Annotated[
        Path | None,
        typer.Option("--svg", callback=writable, metavar="FILE", help="Write only this picture."),
    ] = None,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", callback=writable, metavar="FILE", help="Write only this page."),
    ] = None,
    files: Annotated[
        bool, typer.Option("--files/--no-files", help="Write a picture and a page, or no files.")
    ] = True,
    launch: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Draw an algorithm: its rounds as a table, a picture (SVG), and a page that plays it (HTML).

    Drawings have the transfers of each round, the contents of each rank, and the bytes per link.
    Their default names are OPERATION-ALGORITHM-RANKS.svg and .html. A schedule from a file is also
    checked: a wrong one is drawn with its error, and the exit code is 1. An operation alone lists
    its algorithms.
    """
    from unisono.bench import parse_size
    from unisono.show import document, table, view
    from unisono.types import Op

    _check_given(context)
    if what in list(Op) and algorithm is None:
        _list_algorithms(what, ranks, size, json_path)
        return
    try:
        schedule, name = _find(what, algorithm, ranks, root)
        if len(schedule.transfers) > _MOST_TRANSFERS:
            raise ValueError(
                f"{name} has {len(schedule.transfers):,} transfers; at most "
                f"{_MOST_TRANSFERS:,} can be drawn: use fewer ranks (-n), or `unisono "
                "simulate`"
            )
        nbytes = None if size is None else parse_size(size)
        with progress() as step:
            step(f"{name}: {len(schedule.transfers):,} transfers, round by round", 0.0)
            schedule_view = view(schedule, nbytes=nbytes)
            paths = _paths(schedule_view, name, svg_path, html_path, files)
            drawings = []
            for number, path in enumerate(paths, 1):
                step(f"{path}", number / (len(paths) + 1))
                drawings.append((path, _draw(schedule_view, path, layout)))
        for path, text in drawings:
            path.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = result_console(json_path)
    console.print(table(schedule_view, every=every))
    for path in paths:
        console.print(f"written: {path}", style="dim", highlight=False, soft_wrap=True)
    write_json(document(schedule_view), json_path)
    for page in (path for path in paths if launch and path.suffix == ".html"):
        typer.launch(str(page.resolve()))
    raise typer.Exit(0 if schedule_view.problem is None else 1)


_DRAWING_OPTIONS = {
    "root": "--root",
    "every": "--all",
    "layout": "--layout",
    "svg_path": "--svg",
    "html_path": "--html",
    "files": "--files",
    "launch": "--open",
}
"""Options that do not apply to a list of algorithms."""


def _check_given(context: typer.Context) -> None:
    """Refuses options that the request would ignore."""
    from unisono.types import Op

    what, params = context.params["what"], context.params
    unread: list[tuple[dict[str, str], str]] = []
    if what not in list(Op):
        unread.append(({"ranks": "-n", "root": "--root"}, "the schedule in a file defines its own"))
    elif params["algorithm"] is None:
        unread.append((_DRAWING_OPTIONS, f"needs an algorithm, as in unisono show {what} ring"))
    elif not Op(what).rooted:
        unread.append(({"root": "--root"}, f"{what} has no root"))
    if not (params["files"] or params["svg_path"] or params["html_path"]):
        unread.append(
            (
                {"layout": "--layout", "launch": "--open"},
                "needs a drawing, but --no-files disables them",
            )
        )
    for names, why in unread:
        for name, option in names.items():
            if given(context, name):
                raise typer.BadParameter(f"{option}: {why}")


def _list_algorithms(what: str, ranks: int, size: str | None, json_path: str | None) -> None:
    from unisono.bench import parse_size
    from unisono.show import choices, table_of

    try:
        found = choices(what, ranks=ranks)
        nbytes = None if size is None else parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    result_console(json_path).print(table_of(found, nbytes=nbytes))
    write_json({"op": what, "ranks": ranks, "algorithms": [c.as_dict() for c in found]}, json_path)


def _find(what: str, algorithm: str | None, ranks: int, root: int) -> tuple[Schedule, str]:
    """Returns the requested schedule, and the name of its files."""
    from unisono.algorithms import build
    from unisono.types import Op

    if what not in list(Op):
        if not Path(what).exists():
            raise ValueError(f"{what} is neither a file nor one of the operations {', '.join(Op)}")
        if algorithm is not None:
            raise ValueError(f"{what} is a schedule, so algorithm {algorithm} cannot be chosen")
        return _read(Path(what)), Path(what).stem
    assert algorithm is not None, "an operation alone lists its algorithms"
    return build(what, algorithm, ranks=ranks, root=root), f"{what}-{algorithm}-{ranks}"


def _read(path: Path) -> Schedule:
    """Reads a schedule from a file that `schedule.to_json` or `--json` wrote."""
    from unisono.schedule import from_json
    from unisono.show import FORMAT
    from unisono.text_files import reading

    with reading(path) as text:
        try:
            found = json.loads(text)
        except ValueError:
            found = None  # `from_json` reports the error
        if isinstance(found, dict) and found.get("format") == FORMAT:
            return from_json(json.dumps(found.get("schedule")))
        return from_json(text)


def _paths(
    schedule_view: ScheduleView,
    name: str,
    svg_path: Path | None,
    html_path: Path | None,
    files: bool,
) -> list[Path]:
    """Returns the files to write: those of the options, else both default names."""
    from unisono.show import MAX_RANKS

    asked = [path for path in (svg_path, html_path) if path is not None]
    for path, suffix in ((svg_path, ".svg"), (html_path, ".html")):
        if path is not None and path.suffix != suffix:
            raise ValueError(f"{path}: the file name must end in {suffix}")
    if asked or not files or schedule_view.schedule.collective.ranks > MAX_RANKS:
        return asked
    return [Path(f"{name}.svg"), Path(f"{name}.html")]


def _draw(schedule_view: ScheduleView, path: Path, layout: str) -> str:
    from unisono.show import Arrangement, html, svg

    if layout not in list(Arrangement):
        raise ValueError(f"layout {layout} is not one of {', '.join(Arrangement)}")
    return (svg if path.suffix == ".svg" else html)(schedule_view, shape=Arrangement(layout))
