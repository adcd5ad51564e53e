"""The command `learn`: opens a lab of the course in the browser."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from unisono.course import LANGUAGES, chapters, lab
from unisono.extras import with_cure


def learn(
    chapter: Annotated[
        str | None, typer.Argument(help="Number or name of a chapter. Without it: list them.")
    ] = None,
    language: Annotated[
        str, typer.Option(help=f"Language: {' or '.join(LANGUAGES)}.", metavar="LANGUAGE")
    ] = "en",
    edit: Annotated[bool, typer.Option("--edit", help="Open the lab's code for changes.")] = False,
    port: Annotated[int | None, typer.Option(help="Port of the server.")] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="Open no browser; print the address only.")
    ] = False,
) -> None:
    """Open a lab of the course: predict, run, compare. Without a chapter, list all chapters."""
    if chapter is None:
        if language not in LANGUAGES:
            raise typer.BadParameter(f"language: expected en or zh, got {language!r}")
        for each in chapters():
            typer.echo(f"{each.number}  {each.name:<12} {each.titles[language]}")
        return
    try:
        file = lab(chapter, language)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if find_spec("marimo") is None:
        raise with_cure(ModuleNotFoundError(name="marimo"), "unisono learn")
    command = [sys.executable, "-m", "marimo", "edit" if edit else "run", str(file)]
    command += [] if edit else ["--include-code"]
    command += ["--port", str(port)] if port else []
    raise typer.Exit(subprocess.call([*command, *(["--headless"] if headless else [])]))
