"""The elements of a lab: a question, the wait for its answer, pictures and pages that play."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def ask(answers: Mapping[str, Any]) -> Any:
    """Returns a choice between answers, by their text, whose `value` is None until the reader
    chooses. Where no reader is (a test, an export), the first answer is chosen.
    """
    import marimo

    first = None if marimo.running_in_notebook() else next(iter(answers))
    return marimo.ui.radio(dict(answers), value=first)


def wait_for(*questions: Any) -> None:
    """Stops a cell, and the cells that use its results, until each question has an answer."""
    import marimo

    marimo.stop(any(question.value is None for question in questions))


def player(page: str, *, height: int = 640) -> Any:
    """Returns an element that shows a page of `unisono.show`, with its controls, in this height in
    pixels.
    """
    import marimo

    return marimo.iframe(page, height=f"{height}px")


def picture(svg: str) -> Any:
    """Returns an element that shows an SVG picture as wide as the page at most."""
    import marimo

    drawing = svg[svg.index("<svg") :]
    return marimo.Html(
        re.sub(r"<svg ", '<svg style="max-width:100%;height:auto" ', drawing, count=1)
    )
