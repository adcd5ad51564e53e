"""Output of commands: tables and files. Paths are checked before a command does its work."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

STDOUT = "-"
_PIPE_COLUMNS = 150

_Output = TypeVar("_Output", Path, str, None)


def writable(path: _Output) -> _Output:
    """Returns the path of an output file if the file can be written. Options use this function as a
    callback. Creates missing folders. Raises a usage error if the file cannot be written.

    >>> writable("-")
    '-'
    """
    if path is None or str(path) == STDOUT:
        return path
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from error
    return path


def writable_folder(path: Path | None) -> Path | None:
    """Returns the path of an output folder if files can be written there. Options use this function
    as a callback. Creates the folder. Raises a usage error if it cannot be made or written to.
    """
    if path is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {path}: {error.strerror}") from error
    return path


def given(context: typer.Context, name: str) -> bool:
    """Returns True if the user gave this option, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json", callback=writable, metavar="PATH", help=("Write JSON to this file; - is stdout.")
    ),
]


def write_json(document: dict[str, object], json_path: str | None) -> None:
    """Writes a document as JSON to a file, or to standard output for `-`. Does nothing for None."""
    if json_path is None:
        return
    text = json.dumps(document, indent=2) + "\n"
    if json_path == STDOUT:
        sys.stdout.write(text)
    else:
        Path(json_path).write_text(text, encoding="utf-8")


def result_console(json_path: str | None) -> Console:
    """Returns the console for tables: standard output, or standard error if JSON is written to
    standard output."""
    from rich.console import Console

    console = Console(stderr=json_path == STDOUT)
    return console if console.is_terminal else Console(file=console.file, width=_PIPE_COLUMNS)


def print_written(console: Console, paths: Iterable[Path]) -> None:
    """Prints the paths of the files that a command has written, one per line."""
    for path in paths:
        console.print(f"written: {path}", style="dim", highlight=False, soft_wrap=True)


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Displays a progress bar on standard error and removes it at the end. Yields a function that
    takes the current step and the fraction of the work that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda step, share: bar.update(task, description=step, completed=share)
