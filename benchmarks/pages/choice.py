"""Parts of the results about algorithm choice and the cost of reproducible calls."""

from __future__ import annotations

from operator import truediv
from statistics import geometric_mean, median
from typing import Any

from pages.target_rows import HEAD, at_most
from unisono.bench.sizes import format_size

MEAN_REGRET, WORST_REGRET, PRICE = 1.05, 1.30, 1.10


def render_choice(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `regret.py` as Markdown."""
    cells = document["cells"]
    lines = [
        "`python benchmarks/regret.py`: all algorithms are measured in alternation. Regret is the",
        "time of the default over that of the best. Other rounds measure the best than those that",
        "selected it.",
        "",
        *HEAD,
        at_most(
            f"regret, geometric mean of {len(cells)} cells",
            MEAN_REGRET,
            document["geometric_mean"],
        ),
        at_most("regret, worst cell", WORST_REGRET, document["worst"]),
        "",
    ]
    return lines + _grid(
        ("operation", "ranks"),
        [
            ((cell["op"], str(cell["ranks"])), cell["size_bytes"], f"{cell['regret']:.2f}")
            for cell in cells
        ],
    )


def render_reproducible(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `reproducible.py` as Markdown."""
    rows = document["rows"]
    prices = [
        median(map(truediv, row["reproducible_s"], row["default_s"]))  # one ratio per round
        for row in rows
    ]
    lines = [
        "`python benchmarks/reproducible.py`: a reproducible and a default communicator of the",
        "same ranks alternate. The price is the time of a reproducible call over that of a",
        "default call.",
        "",
        *HEAD,
        at_most(
            f"price, geometric mean of {len(rows)} cells", PRICE, geometric_mean(prices), ".2f"
        ),
        at_most("price, median cell", PRICE, median(prices), ".2f"),
        at_most("price, worst cell", PRICE, max(prices), ".2f"),
        "",
    ]
    return lines + _grid(
        ("operation", "ranks", "type"),
        [
            ((row["op"], str(row["ranks"]), row["dtype"]), row["nbytes"], f"{price:.2f}")
            for row, price in zip(rows, prices, strict=True)
        ],
    )


def _grid(head: tuple[str, ...], cells: list[tuple[tuple[str, ...], int, str]]) -> list[str]:
    """Returns a table with a row for each kind of case (for example an operation and its number of
    ranks) and a column for each size. Small sizes are rounded up to a whole number of elements per
    rank.
    """
    by_kind: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for kind, nbytes, text in cells:
        by_kind.setdefault(kind, []).append((nbytes, text))
    sizes = next(iter(by_kind.values()))
    names = [*head, *(format_size(nbytes) for nbytes, _ in sizes)]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for kind, found in by_kind.items():
        lines.append("| " + " | ".join((*kind, *(text for _, text in found))) + " |")
    return lines
