"""The parts of the results about checkpoints and about models on meta, from the JSON
documents of `checkpoint_rate.py` and `build_memory.py`.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from pages.target_rows import HEAD, at_most, target_row

LEAST_RATE, MOST_BLOCKED, MOST_MEMORY = 0.8, 0.05, 1.3


def render_checkpoints(documents: dict[str, dict[str, Any]]) -> list[str]:
    """Renders the results of `checkpoint_rate.py`, by optimizer, as Markdown."""
    lines = [
        "`python benchmarks/checkpoint_rate.py`: 4 ranks, ZeRO-3, all bytes on the disk at the",
        "end; medians, in brackets the least and the most. Each turn also writes plain files of as",
        "many bytes; the disk's own rate varies by a factor of 2. After each save, all weights are",
        "loaded and compared.",
        "",
        *HEAD,
    ]
    for name, document in sorted(documents.items(), key=lambda each: each[1]["nbytes"]):
        what = f"{document['nbytes'] / 1e9:.2f} GB ({name})"
        rate = {
            which: [document["nbytes"] / 1e9 / each for each in document[which]]
            for which in ("save", "plain")
        }
        ratio = median(rate["save"]) / median(rate["plain"])
        lines += [
            f"| {what}: plain files | | {_spread(rate['plain'])} GB/s | - |",
            target_row(
                f"{what}: checkpoint, over plain files",
                f">= {LEAST_RATE:g}",
                f"{_spread(rate['save'])} GB/s, {ratio:.2f}",
                ratio >= LEAST_RATE,
            ),
            at_most(
                f"{what}: part of a step that an asynchronous save blocks",
                MOST_BLOCKED,
                median(document["blocked"]) / median(document["step"]),
                ".1%",
            ),
        ]
    return lines


def render_build(document: dict[str, Any]) -> list[str]:
    """Renders the results of `build_memory.py` as Markdown."""
    lines = [
        "`python benchmarks/build_memory.py`: 4 ranks, ZeRO-3; a rank keeps a part of"
        f" {document['part'] / 1e6:.0f} MB.",
        "Peak memory of building, less one layer, over the part:",
        "",
        *HEAD,
    ]
    names = {"files": "values from files of safetensors", "seed": "values from initializers"}
    for name, text in names.items():
        lines.append(at_most(text, MOST_MEMORY, document[name]["ratio"], ".2f"))
    ratio = document["cpu"]["ratio"]
    lines.append(target_row("model built whole on the CPU, then divided", "", f"{ratio:.2f}", None))
    return lines


def _spread(found: list[float]) -> str:
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
