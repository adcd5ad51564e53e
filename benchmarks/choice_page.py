"""The parts of benchmarks/RESULTS.md about what is chosen, and what reproducible calls cost."""

from __future__ import annotations

from operator import truediv
from statistics import geometric_mean, median
from typing import Any

from bars import HEAD, at_most

from unisono.bench.sizes import format_size

MEAN_REGRET, WORST_REGRET, PRICE = 1.05, 1.30, 1.10


def render_choice(document: dict[str, Any]) -> list[str]:
    """`document`: of `regret.py`."""
    cells = document["cells"]
    lines = [
        "`python benchmarks/regret.py`: every algorithm measured in turns; the time of the default",
        "over that of the best. Other turns judge than those that chose the best.",
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
    """`document`: of `reproducible.py`."""
    rows = document["rows"]
    prices = [
        median(map(truediv, row["reproducible_s"], row["default_s"]))  # turn by turn
        for row in rows
    ]
    lines = [
        "`python benchmarks/reproducible.py`: a reproducible communicator and a usual one of the",
        "same ranks in turns; the time of a reproducible call over that of a usual one.",
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
    """A row for each kind, a column for each place in its sizes: those of few bytes are rounded up
    to a whole number of elements for each rank."""
    by_kind: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for kind, nbytes, text in cells:
        by_kind.setdefault(kind, []).append((nbytes, text))
    sizes = next(iter(by_kind.values()))
    names = [*head, *(format_size(nbytes) for nbytes, _ in sizes)]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for kind, found in by_kind.items():
        lines.append("| " + " | ".join((*kind, *(text for _, text in found))) + " |")
    return lines
