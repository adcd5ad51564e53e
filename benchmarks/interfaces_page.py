"""The parts of benchmarks/RESULTS.md about JAX and the C interface, from the JSON documents of
`jax_collectives.py` and `c_interface.py`.
"""

from __future__ import annotations

from statistics import geometric_mean, median
from typing import Any

from timing import microseconds


def render_jax(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `jax_collectives.py` as Markdown."""
    lines = [
        "`python benchmarks/jax_collectives.py`: `psum` of float32 between processes, with JAX's "
        "dispatch.",
        f"Microseconds, medians of {document['options']['rounds']} rounds (quartiles). Gloo is "
        "JAX's own.",
        "",
        "| ranks | bytes | unisono | gloo | gloo over unisono |",
        "|---|---|---|---|---|",
    ]
    ratios = []
    for ranks, kinds in document["rows"].items():
        for nbytes in kinds["unisono"][0]:
            ours, theirs = ([each[nbytes] for each in kinds[kind]] for kind in ("unisono", "gloo"))
            ratios.append(median(theirs) / median(ours))
            lines.append(
                f"| {ranks} | {nbytes} | {microseconds(ours)} | {microseconds(theirs)} "
                f"| {ratios[-1]:.1f} |"
            )
    return [*lines, "", f"Geometric mean of the ratios: {geometric_mean(ratios):.1f}."]


def render_c_interface(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `c_interface.py` as Markdown."""
    lines = [
        f"`python benchmarks/c_interface.py`: all_reduce of {document['ranks']} ranks, called from "
        "C and from Python.",
        "",
        "| bytes | C, us | Python, us |",
        "|---|---|---|",
    ]
    for nbytes, kinds in document["rows"].items():
        times = (f"{1e6 * median(kinds[kind]):.2f}" for kind in ("C", "Python"))
        lines.append(f"| {nbytes} | {' | '.join(times)} |")
    return lines
