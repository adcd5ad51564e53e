"""The command `unisono show`. This module is fast to import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from unisono.commands.command_options import with_options
from unisono.commands.outputs import print_written, progress, result_console, write_json
from unisono.commands.show_options import ShowOptions

if TYPE_CHECKING:
    from unisono.schedule import Schedule
    from unisono.show import ScheduleView

_MOST_TRANSFERS = 1 << 18
"""Maximum number of transfers of a drawing. More transfers take over half a minute and are
unreadable."""


@with_options(ShowOptions)
def show(context: typer.Context, options: ShowOptions) -> None:
    """Draw an algorithm: its rounds as a table, a picture (SVG), and a page that plays it (HTML).

    Drawings have the transfers of each round, the contents of each rank, and the bytes per link.
    Their default names are OPERATION-ALGORITHM-RANKS.svg and .html. A schedule from a file is also
    checked: a wrong one is drawn with its error, and the exit code is 1. An operation alone lists
    its algorithms. A pipeline schedule, such as 1f1b, is drawn as the passes of each rank; --json
    writes it for `unisono simulate`.
    """
    from unisono.commands.show_pipeline import find_pipeline, show_pipeline
    from unisono.show import document, table
    from unisono.types import Op

    options.check(context)
    if (pipeline := find_pipeline(options)) is not None:
        options.check_pipeline(context)
        show_pipeline(pipeline, options)
        return
    if options.what in list(Op) and options.algorithm is None:
        _list_algorithms(options)
        return
    try:
        schedule_view, paths = _write_drawings(options)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = result_console(options.json_path)
    console.print(table(schedule_view, every=options.every))
    print_written(console, paths)
    write_json(document(schedule_view), options.json_path)
    for page in (path for path in paths if options.launch and path.suffix == ".html"):
        typer.launch(str(page.resolve()))
    raise typer.Exit(0 if schedule_view.problem is None else 1)


def _list_algorithms(options: ShowOptions) -> None:
    from unisono.bench import parse_size
    from unisono.show import choices, table_of

    what, ranks = options.what, options.ranks
    try:
        found = choices(what, ranks=ranks)
        nbytes = None if options.size is None else parse_size(options.size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    result_console(options.json_path).print(table_of(found, nbytes=nbytes))
    listed = [choice.as_dict() for choice in found]
    write_json({"op": what, "ranks": ranks, "algorithms": listed}, options.json_path)


def _write_drawings(options: ShowOptions) -> tuple[ScheduleView, list[Path]]:
    """Writes the requested drawings of the schedule. Returns the schedule's view (the data that are
    drawn) and the paths of the files. Raises ValueError or OSError."""
    from unisono.bench import parse_size
    from unisono.show import view

    schedule, name = _find(options)
    count = len(schedule.transfers)
    if count > _MOST_TRANSFERS:
        raise ValueError(
            f"{name} has {count:,} transfers; at most {_MOST_TRANSFERS:,} can be drawn: use fewer "
            "ranks (-n), or `unisono simulate`"
        )
    nbytes = None if options.size is None else parse_size(options.size)
    with progress() as step:
        step(f"{name}: {count:,} transfers, round by round", 0.0)
        schedule_view = view(schedule, nbytes=nbytes)
        paths = _paths(schedule_view, name, options)
        drawings = []
        for number, path in enumerate(paths, 1):
            step(f"{path}", number / (len(paths) + 1))
            drawings.append((path, _draw(schedule_view, path, options.layout)))
    for path, text in drawings:
        path.write_text(text, encoding="utf-8")
    return schedule_view, paths


def _find(options: ShowOptions) -> tuple[Schedule, str]:
    """Returns the requested schedule, and the default name of its drawings without suffix."""
    from unisono.algorithms import build
    from unisono.types import Op

    what, algorithm, ranks = options.what, options.algorithm, options.ranks
    if what not in list(Op):
        if not Path(what).exists():
            raise ValueError(f"{what} is neither a file nor one of the operations {', '.join(Op)}")
        if algorithm is not None:
            raise ValueError(f"{what} is a schedule, so algorithm {algorithm} cannot be chosen")
        return _read(Path(what)), Path(what).stem
    assert algorithm is not None, "an operation alone lists its algorithms"
    return build(what, algorithm, ranks=ranks, root=options.root), f"{what}-{algorithm}-{ranks}"


def _read(path: Path) -> Schedule:
    """Reads a schedule from a file of `schedule.to_json` or of `unisono show --json`."""
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


def _paths(schedule_view: ScheduleView, name: str, options: ShowOptions) -> list[Path]:
    """Returns the paths of the files to write: the paths in the options, else the two default
    paths."""
    from unisono.show import MAX_RANKS

    svg_path, html_path = options.svg_path, options.html_path
    asked = [path for path in (svg_path, html_path) if path is not None]
    for path, suffix in ((svg_path, ".svg"), (html_path, ".html")):
        if path is not None and path.suffix != suffix:
            raise ValueError(f"{path}: the file name must end in {suffix}")
    if asked or not options.files or schedule_view.schedule.collective.ranks > MAX_RANKS:
        return asked
    return [Path(f"{name}.svg"), Path(f"{name}.html")]


def _draw(schedule_view: ScheduleView, path: Path, layout: str) -> str:
    from unisono.show import Arrangement, html, svg

    if layout not in list(Arrangement):
        raise ValueError(f"layout {layout} is not one of {', '.join(Arrangement)}")
    return (svg if path.suffix == ".svg" else html)(schedule_view, shape=Arrangement(layout))
