"""Writes the pages of results: `python benchmarks/write_pages.py`.

`RESULTS.md` has the collectives of one host, and links to the pages of `TOPICS` in `results/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from pages.checkpoints import render_build, render_checkpoints
from pages.choice import render_choice, render_reproducible
from pages.controller import render_controller
from pages.faults import render_faults
from pages.hosts import render_hosts
from pages.install import render_install
from pages.interfaces import (
    render_c_interface,
    render_jax,
    render_jax_hosts,
    render_jax_scatters,
    render_jax_transformer,
    render_mlx,
)
from pages.messages import render_p2p
from pages.model_layouts import render_model_layouts
from pages.peers import PEERS_PREFIX, render_peers, render_puts
from pages.published import render_published
from pages.shared_arrays import render_shared_arrays
from pages.simulator import render_calibration, render_lab, render_speed
from pages.sweeps import machine_text, render_page, render_train
from pages.training import PARTS, render_training
from pages.trees import render_trees
from pages.vllm import render_vllm
from pages.weight_transfer import render_weight_transfer

HERE = Path(__file__).parent
APIS = ("native", "torch")
Lines = list[str]
Named = dict[str, dict[str, Any]]
"""Documents by the part of their file's name that follows a prefix."""


class Topic(NamedTuple):
    """A page of results beside the first one."""

    title: str
    sections: Sequence[str]


TOPICS: Mapping[str, Topic] = {
    "hosts": Topic("several hosts", ("Several hosts", "Faults")),
    "messages": Topic("messages", ("Point-to-point", "One-sided access")),
    "shared-arrays": Topic("shared arrays", ("Shared arrays",)),
    "peers": Topic("Intel MPI", ("Intel MPI",)),
    "interfaces": Topic(
        "JAX, MLX, C, vLLM and installation",
        (
            *("JAX", "JAX: wrong sums", "JAX between hosts", "JAX: a training step", "MLX"),
            *("C interface", "vLLM on CPUs", "Installation"),
        ),
    ),
    "training": Topic(
        "training",
        (
            *("Training: digits", "Training", "Models of transformers in layouts"),
            *("Models on the device meta", "Checkpoints", "Weights from a trainer to workers"),
        ),
    ),
    "controller": Topic("controller", ("Controller",)),
    "algorithms": Topic(
        "algorithms and their choice",
        ("Choice", "Published algorithms", "Reproducibility", "Comparison with an older tree"),
    ),
    "simulator": Topic(
        "simulator",
        (
            "Simulator: prediction errors",
            "Simulator: comparison with hosts of a lab",
            "Simulator: run time",
        ),
    ),
}
"""By the name of the page: `results/hosts.md` has the sections of "hosts"."""

FILES: Mapping[str, tuple[str, Callable[[Any], Lines]]] = {
    "Installation": ("install-time", render_install),
    "Shared arrays": ("shared-arrays", render_shared_arrays),
    "One-sided access": ("put", render_puts),
    "JAX": ("jax-collectives", render_jax),
    "JAX: wrong sums": ("jax-scatters", render_jax_scatters),
    "JAX between hosts": ("jax-hosts", render_jax_hosts),
    "JAX: a training step": ("jax-transformer", render_jax_transformer),
    "MLX": ("mlx-collectives", render_mlx),
    "C interface": ("c-interface", render_c_interface),
    "Published algorithms": ("published", render_published),
    "Choice": ("regret", render_choice),
    "Reproducibility": ("reproducible", render_reproducible),
    "Comparison with an older tree": ("trees", render_trees),
    "Models of transformers in layouts": ("model-layouts", render_model_layouts),
    "Weights from a trainer to workers": ("weight-transfer", render_weight_transfer),
    "Models on the device meta": ("build-memory", render_build),
    "Faults": ("faults", render_faults),
    "Simulator: comparison with hosts of a lab": ("simulator-lab", render_lab),
    "Simulator: run time": ("simulator-speed", render_speed),
}
"""Sections of one file of results: the file's name, and the function that renders it."""

FAMILIES: Mapping[str, tuple[str, Callable[[Named], Lines]]] = {
    "Several hosts": ("hosts-", render_hosts),
    "Point-to-point": ("p2p-", render_p2p),
    "Intel MPI": (PEERS_PREFIX, lambda found: render_peers(list(found.values()))),
    "Controller": ("controller-", render_controller),
    "vLLM on CPUs": ("vllm-decode-", render_vllm),
    "Checkpoints": ("checkpoint-", render_checkpoints),
}
"""Sections of several files of results: the beginning of the files' names, and the function that
renders them."""


def sections_of(folder: Path) -> dict[str, Lines]:
    """Returns the sections that have results in the folder, by title."""
    found: dict[str, Lines] = {}
    for title, (prefix, render) in FAMILIES.items():
        if documents := _named(folder, prefix):
            found[title] = render(documents)
    for title, (stem, render_one) in FILES.items():
        path = folder / f"{stem}.json"
        if path.exists():
            found[title] = render_one(json.loads(path.read_text()))
    paths = {name: folder / f"{name}.json" for name in PARTS}
    parts = {name: json.loads(each.read_text()) for name, each in paths.items() if each.exists()}
    if parts:
        found["Training"] = render_training(parts)
    for task, document in _named(folder, "train-").items():  # of `unisono train TASK --json`
        found[f"Training: {task}"] = list(render_train(task, document))
    if runs := sorted(folder.glob("calibration-*.json")):
        found["Simulator: prediction errors"] = render_calibration(runs)
    return found


def write_pages(folder: Path, page: Path) -> list[Path]:
    """Writes `page`, and in the folder the pages of the topics that have results there. Returns the
    paths of all pages.
    """
    sweeps = [found for api in APIS for found in _named(folder, f"{api}-").values()]
    sections, written = sections_of(folder), [page]
    links: dict[str, str] = {}
    for name, topic in TOPICS.items():
        titles = [title for title in topic.sections if title in sections]
        if not titles:
            continue
        path = folder / f"{name}.md"
        lines = [f"# Results: {topic.title}", "", machine_text(sweeps)]
        for title in titles:
            lines += ["", f"## {title}", "", *sections[title]]
        path.write_text("\n".join(lines) + "\n")
        links[os.path.relpath(path, page.parent)] = ", ".join(titles)
        written.append(path)
    page.write_text(render_page(sweeps, links))
    return written


def _named(folder: Path, prefix: str) -> Named:
    """Returns the documents in the files `prefixNAME.json`, by name."""
    return {
        path.stem.removeprefix(prefix): json.loads(path.read_text())
        for path in sorted(folder.glob(f"{prefix}*.json"))
    }


def main(
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = HERE / "results",
    page: Annotated[Path, typer.Option(help="First page to write.")] = HERE / "RESULTS.md",
) -> None:
    write_pages(folder, page)


if __name__ == "__main__":
    typer.run(main)
