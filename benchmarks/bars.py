"""Rows of the tables that say what was to be reached."""

from __future__ import annotations

HEAD = ("| measure | bar | measured | reached |", "|---|---|---|---|")


def bar(measure: str, wanted: str, measured: str, reached: bool | None) -> str:
    """One row; `reached` is None where nothing tells."""
    mark = {True: "yes", False: "**no**", None: "-"}[reached]
    return f"| {measure} | {wanted} | {measured} | {mark} |"


def at_most(measure: str, most: float, measured: float, form: str = ".3f") -> str:
    """A row whose measure must not be above a number, as far as it is shown."""
    shown = format(measured, form)
    wanted = f"<= {most:.0%}" if form.endswith("%") else f"<= {most:g}"
    scale = 100 if form.endswith("%") else 1
    return bar(measure, wanted, shown, float(shown.rstrip("%")) <= most * scale)
