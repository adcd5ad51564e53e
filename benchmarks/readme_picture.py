"""Draws the README's picture `docs/pictures/all_reduce.svg` from `benchmarks/results`: time by
size, for us and other libraries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from unisono.bench.sizes import format_size

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "all_reduce.svg"
PANELS = {"torch": "torch.distributed", "native": "NumPy arrays, without torch"}
NAMES = {
    "unisono": "unisono",
    "unisono-torch": "unisono",
    "gloo": "Gloo",
    "openmpi": "Open MPI",
}
COLOURS = {"unisono": "#1f6feb", "Gloo": "#d1242f", "Open MPI": "#8250df"}


def draw(ranks: int = 4) -> Figure:
    """Returns one panel for each API, with milliseconds of an all_reduce by size on logarithmic
    axes.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for panel, (api, title) in zip(panels, PANELS.items(), strict=True):
        document = json.loads((RESULTS / f"{api}-n{ranks}-all_reduce.json").read_text())
        _draw_panel(panel, document["rows"])
        panel.set_title(f"all_reduce, {ranks} ranks, {title}", fontsize=10)
    panels[0].set_ylabel("time (ms)")
    return figure


def _draw_panel(panel: Any, rows: list[dict[str, Any]]) -> None:
    sizes = [row["size_bytes"] for row in rows]
    for name, label in NAMES.items():
        timed = [row for row in rows if name in row["results"]]
        times = [row["results"][name]["time_s"] * 1e3 for row in timed]
        if times:
            positions = [row["size_bytes"] for row in timed]
            style = {"color": COLOURS[label], "marker": "o", "markersize": 3}
            panel.plot(positions, times, label=label, **style)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes, [format_size(size) for size in sizes], fontsize=8)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    # Equal results must give an equal file, so text stays text, without random ids or a date.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "unisono"})
    PICTURE.parent.mkdir(exist_ok=True)
    draw().savefig(PICTURE, format="svg", metadata={"Date": None})
