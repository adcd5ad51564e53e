"""Draws the example of overlap over time."""

from __future__ import annotations

from unisono.figures import new_figure, svg_text
from unisono.train.overlap import OverlapResult


def overlap_svg(result: OverlapResult) -> str:
    """Returns a picture of the fastest measured step of each case, as the text of an SVG file.

    Each case has a row for its computation and one for its link, on one axis of time. Each bar
    of a link is a message. Raises UnsupportedError without matplotlib.
    """
    figure = new_figure(11, 0.8 + 0.8 * len(result.cases))
    axes = figure.subplots()
    names: list[str] = []
    for each in result.cases:
        step = min(each.steps, key=lambda step: step.seconds)
        computed = [(0.0, 1e3 * step.computed_s[-1])]
        sent = [(1e3 * use.begun_s, 1e3 * (use.ended_s - use.begun_s)) for use in step.link]
        rows = (
            ("computation", computed, ["#8ecae6"]),
            ("link", sent, ["#ffb703", "#fb8500"]),  # neighbours differ
        )
        for row, bars, colours in rows:
            place = (len(names) - 0.4, 0.8)
            axes.broken_barh(bars, place, color=colours)
            names.append(f"{each.case.name}: {row}")
    axes.set_yticks(range(len(names)), names, size=8)
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    return svg_text(figure)
