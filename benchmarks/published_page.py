"""The part of benchmarks/RESULTS.md about algorithm files that others have published."""

from __future__ import annotations

from collections import Counter
from typing import Any


def render_published(document: dict[str, Any]) -> list[str]:
    """`document`: what `unisono prove FILES --run 16 --json` writes."""
    files = document["files"]
    lines = [
        "`unisono prove FILES --run 16 --json benchmarks/results/published.json` on the 72 MSCCL",
        "programs of `tools/msccl-algorithms` of ROCm/rccl, in all versions that its history has.",
        "Ten names (`allgather_*_direct_*`, `allgather_64n_rd_*`) are not in that history: theirs",
        "are not the files themselves. Of eight, passages were read, the rest follows their",
        "pattern; the lengths of all ten are those published.",
        "",
        "| operation | ranks | files | proved | run, and equal to NumPy |",
        "|---|---|---|---|---|",
    ]
    kinds = Counter((each["op"], each["ranks"]) for each in files)
    for (op, ranks), count in sorted(kinds.items()):
        some = [each for each in files if (each["op"], each["ranks"]) == (op, ranks)]
        proved = sum(each["proved"] for each in some)
        equal = sum(each["ran"] is True for each in some) if ranks <= 16 else "more than 16 ranks"
        lines.append(f"| {op} | {ranks} | {count} | {proved} | {equal} |")
    refused = [each for each in files if not each["proved"]]
    if refused:
        lines += ["", *(f"- `{each['file']}` is refused: {each['reason']}" for each in refused)]
    return lines
