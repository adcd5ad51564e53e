"""The part of the results about installation, from the JSON document of
`install_time.py`.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from pages.target_rows import HEAD, target_row

BARS = (
    ("wheel to first all_reduce: pip and a program of 2 ranks", "total_s", 30.0),
    ("of it: the program, from its start to its end", "program_s", None),
    ("`import unisono`, after NumPy", "import_s", 0.03),
    ("`unisono.init` until the first of 2 ranks is ready", "first_ready_s", 0.25),
    ("`unisono.init` until both are ready", "last_ready_s", None),
)
"""Of each row: its text, its key in a round, and the most seconds."""


def render_install(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `install_time.py` as Markdown."""
    rounds = document["rounds"]
    lines = [
        "`python benchmarks/install_time.py` after `make wheels`: environments without a compiler.",
        f"Medians of {len(rounds)} rounds; in brackets the least and the most.",
        "",
        *HEAD,
    ]
    for text, key, bar in BARS:
        found = [each[key] for each in rounds]
        spread = f"{median(found):.3f} s ({min(found):.3f} to {max(found):.3f})"
        if bar is None:
            lines.append(target_row(text, "", spread, None))
        else:
            lines.append(target_row(text, f"<= {bar:g} s", spread, median(found) <= bar))
    return lines
