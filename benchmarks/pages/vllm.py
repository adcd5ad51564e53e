"""The part of the results about vLLM, from the JSON documents of `vllm_decode.py`."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any


def render_vllm(documents: Mapping[str, dict[str, Any]]) -> list[str]:
    """Renders the results of runs of `vllm_decode.py --out` as Markdown."""
    lines = [
        "`python benchmarks/vllm_decode.py`, in the environment of",
        "`make integrations FRAMEWORKS=vllm`: a Llama of 8 layers, 512 wide, bfloat16, greedy",
        "tokens; 17 all_reduce calls a token. vLLM's scheduler shares the cores. Times are medians",
        "of steps; in brackets the first and the last tenth. `over ours`: turn by turn.",
        "Engines of one kind differ by 10 %, so each round starts them anew.",
        "",
        "| ranks | bytes | library | ms a token | over ours | turns x tokens |",
        "|---|---|---|---|---|---|",
    ]
    for document in sorted(documents.values(), key=lambda each: int(each["ranks"])):
        for name, row in document["libraries"].items():
            lines.append(_row(document, name, row))
    return lines


def _row(document: dict[str, Any], name: str, row: dict[str, Any]) -> str:
    ratios = [] if name == "unisono" else row["ratios"]
    ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
    time = f"{row['median_ms']:.2f} ({row['low_ms']:.2f} to {row['high_ms']:.2f})"
    return (
        f"| {document['ranks']} | {document['nbytes']} | {name} | {time} | {ratio} "
        f"| {row['turns']} x {document['tokens']} |"
    )
