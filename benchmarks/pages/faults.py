"""The part of the results about faults between hosts."""

from __future__ import annotations

from typing import Any

ROUNDS = 50


def render_faults(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `faults.py` as Markdown."""
    amid = document.get("under_way", "calls")
    lines = [
        f"`python benchmarks/faults.py` (root): {amid} are under way on hosts of a lab (of",
        "1+1+1+1, 2+2 and 3+1 ranks in rotation) when the fault occurs. As specified: every",
        "survivor names the lost ranks within 3 s (a stopped rank: within its call's timeout plus",
        "1 s). Later calls fail, descriptors and threads are released, and no host keeps any",
        "resource. An event that loses no rank has no effect.",
        "",
        "| fault | rounds as specified |",
        "|---|---|",
    ]
    for each in document["faults"]:
        ended = f"{ROUNDS} of {ROUNDS}" if each["as_specified"] else f"**not all of {ROUNDS}**"
        lines.append(f"| {each['fault']} | {ended} |")
    return lines
