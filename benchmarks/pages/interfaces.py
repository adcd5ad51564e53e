"""The parts of the results about JAX, MLX and the C interface, from the JSON documents of
`jax_collectives.py`, `mlx_collectives.py` and `c_interface.py`.
"""

from __future__ import annotations

from statistics import geometric_mean, median
from typing import Any

from timing import microseconds


def render_jax(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `jax_collectives.py` as Markdown."""
    return _render_collectives(
        "`python benchmarks/jax_collectives.py`: `psum` of float32 between processes, with JAX's "
        "dispatch.",
        "Gloo is JAX's own. Ranks are bound to their part of the cores (`unisono.run(..., "
        "bind=True)`, mpiexec).",
        document,
    )


def render_mlx(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `mlx_collectives.py` as Markdown."""
    return _render_collectives(
        "`python benchmarks/mlx_collectives.py`: `all_sum` of float32 between processes, with "
        "MLX's dispatch.",
        "The ring is MLX's own.",
        document,
    )


def _render_collectives(title: str, peers: str, document: dict[str, Any]) -> list[str]:
    others = [kind for kind in next(iter(document["rows"].values())) if kind != "unisono"]
    names = ["unisono", *others, *(f"{kind} over unisono" for kind in others)]
    lines = [
        title,
        f"Microseconds, medians of {document['options']['rounds']} rounds (quartiles). {peers}",
        "",
        f"| ranks | bytes | {' | '.join(names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    ratios: dict[str, list[float]] = {kind: [] for kind in others}
    for ranks, kinds in document["rows"].items():
        for nbytes in kinds["unisono"][0]:
            times = {kind: [each[nbytes] for each in kinds[kind]] for kind in kinds}
            for kind in others:
                ratios[kind].append(median(times[kind]) / median(times["unisono"]))
            cells = [microseconds(times[kind]) for kind in ("unisono", *others)]
            cells += [f"{ratios[kind][-1]:.1f}" for kind in others]
            lines.append(f"| {ranks} | {nbytes} | {' | '.join(cells)} |")
    means = (f"{kind} {geometric_mean(found):.1f}" for kind, found in ratios.items())
    return [*lines, "", f"Geometric means of the ratios: {', '.join(means)}."]


def render_jax_scatters(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `jax_collectives.py --scatter` as Markdown."""
    lines = [
        "`python benchmarks/jax_collectives.py --scatter 200 --rounds 1`: iterations of "
        f"{document['options']['scatter']} in which a process had a wrong sum, `psum_scatter` of "
        "16 MiB of float32.",
        "",
        "| ranks | unisono | gloo |",
        "|---|---|---|",
    ]
    for ranks, kinds in document["rows"].items():
        wrong = (f"{kinds[kind][0]['wrong']:.0f}" for kind in ("unisono", "gloo"))
        lines.append(f"| {ranks} | {' | '.join(wrong)} |")
    return lines


def render_jax_transformer(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `jax_transformer.py` as Markdown."""
    lines = [
        "`python benchmarks/jax_transformer.py`: a training step of a transformer of 4 blocks; JAX "
        "inserts the collectives. The losses are those of one process; ranks are bound to their "
        "part of the cores.",
        f"Milliseconds, medians of {document['options']['rounds']} rounds.",
        "",
        "| ranks and layout | unisono | gloo | gloo over unisono |",
        "|---|---|---|---|",
    ]
    for name, kinds in document["rows"].items():
        ours, theirs = (median(kinds[kind]) for kind in ("unisono", "gloo"))
        lines.append(f"| {name} | {1e3 * ours:.1f} | {1e3 * theirs:.1f} | {theirs / ours:.2f} |")
    return lines


def render_jax_hosts(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `jax_hosts.py` as Markdown."""
    times_s, link_s = document["times_s"], document["link_s"]
    cells = (
        microseconds(times_s), f"{1e6 * link_s:.0f}", f"{median(times_s) / link_s:.3f}"
    )  # fmt: skip
    return [
        "`python benchmarks/jax_hosts.py`: `psum` of 16 MiB of float32 between two hosts of the "
        "lab with 2 ranks each, over links of 1 Gbit/s. The limit is the time of the bytes that "
        "cross a link, at the payload rate that iperf3 measured after them.",
        "",
        "| unisono, us (quartiles) | limit, us | unisono over the limit |",
        "|---|---|---|",
        f"| {' | '.join(cells)} |",
    ]


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
