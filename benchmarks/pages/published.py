"""The part of the results about published algorithm files."""

from __future__ import annotations

from collections import Counter
from typing import Any


def render_published(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `unisono prove FILES --run 16 --json` as Markdown."""
    files = document["files"]
    lines = [
        "`unisono prove FILES --run 16 --json benchmarks/results/published.json` on the 72 MSCCL",
        "programs of `tools/msccl-algorithms` of ROCm/rccl, in all versions in its history. Ten",
        "names (`allgather_*_direct_*`, `allgather_64n_rd_*`) are missing from that history, so",
        "their files are reconstructions: of eight, passages were available, and the rest follows",
        "their pattern. The lengths of all ten are the published ones.",
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
