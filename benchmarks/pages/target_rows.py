"""Table rows that compare a measurement with a target value."""

from __future__ import annotations

HEAD = ("| measure | target | measured | reached |", "|---|---|---|---|")


def target_row(measure: str, wanted: str, measured: str, reached: bool | None) -> str:
    """Returns one table row; `reached` is None if the measurement is inconclusive."""
    mark = {True: "yes", False: "**no**", None: "-"}[reached]
    return f"| {measure} | {wanted} | {measured} | {mark} |"


def at_most(measure: str, most: float, measured: float, form: str = ".3f") -> str:
    """Returns a row whose printed measurement must not exceed `most`."""
    shown = format(measured, form)
    wanted = f"<= {most:.0%}" if form.endswith("%") else f"<= {most:g}"
    scale = 100 if form.endswith("%") else 1
    return target_row(measure, wanted, shown, float(shown.rstrip("%")) <= most * scale)
