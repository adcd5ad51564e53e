"""The part of the results about weights from a trainer to workers."""

from __future__ import annotations

from statistics import median, quantiles
from typing import Any

from pages.target_rows import HEAD, target_row

FACTOR = 3.0
LINK_SHARE = 0.95


def render_weight_transfer(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `weight_transfer.py` as Markdown."""
    size = document["host"][0]["nbytes"] / 1e9
    lines = [
        f"`python benchmarks/weight_transfer.py`: {size:.2f} GB of bfloat16 in "
        f"{document['host'][0]['tensors']} tensors; {document['turns']} updates",
        "of each library, in turn. A time ends when all workers have all weights. Workers verified",
        "every element. `copy`: all workers copy the weights at once, each in its own memory.",
        "",
        *HEAD,
    ]
    for found in document["host"]:
        ratio = _seconds(found, "gloo") / _seconds(found, "unisono")
        name = f"workers: {found['workers']}; Gloo's time over ours"
        lines.append(target_row(name, f">= {FACTOR:g}", f"{ratio:.2f}", ratio >= FACTOR))
    if "link" in document:
        share = _gbit(document["link"], "unisono") / document["link"]["gbit"]
        name = f"another host, link of {document['link']['gbit']} Gbit/s: share of the link"
        row = target_row(name, f">= {LINK_SHARE:g}", f"{share:.3f}", share >= LINK_SHARE)
        lines.append(row)
    lines += ["", "| workers | library | time, quartiles | GB/s |", "|---|---|---|---|"]
    for found in document["host"]:
        lines += [_row(found, f"{found['workers']}", each) for each in found["times_s"]]
    if "link" in document:
        lines += [_row(document["link"], "1, other host", each) for each in ("unisono", "gloo")]
    lines += ["", "| update of two workers | median |", "|---|---|"]
    texts = {
        "same": "the same workers as before",
        "joined": "one has joined since",
        "killed": "one is killed in the update",
    }
    for name, text in texts.items():
        lines.append(f"| {text} | {1e3 * median(document['changes_s'][name]):.0f} ms |")
    return lines


def _seconds(found: dict[str, Any], library: str) -> float:
    return float(median(found["times_s"][library]))


def _gbit(found: dict[str, Any], library: str) -> float:
    return float(8e-9 * found["nbytes"] / _seconds(found, library))


def _row(found: dict[str, Any], workers: str, library: str) -> str:
    low, middle, high = (1e3 * each for each in quantiles(found["times_s"][library], n=4))
    rate = found["nbytes"] / middle / 1e6
    return f"| {workers} | {library} | {middle:.0f} ms ({low:.0f} to {high:.0f}) | {rate:.2f} |"
