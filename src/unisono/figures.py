"""Matplotlib figures without a window. Matplotlib is an optional dependency."""

from __future__ import annotations

from importlib import util
from io import BytesIO
from typing import TYPE_CHECKING

from unisono.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_plotting() -> None:
    """Raises UnsupportedError if matplotlib is not installed. To be called before a long run, so
    that the error comes early.
    """
    if util.find_spec("matplotlib") is None:
        raise UnsupportedError("--plot needs matplotlib: pip install 'unisono[plot]'")


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure. `width` and `height` are in inches. Raises UnsupportedError without
    matplotlib.
    """
    require_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def svg_text(figure: Figure) -> str:
    """Returns a figure as the text of an SVG file. Its words stay text, which is short."""
    import matplotlib

    with (
        BytesIO() as file,
        matplotlib.rc_context({"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}),
    ):
        figure.savefig(file, format="svg")
        return file.getvalue().decode()
