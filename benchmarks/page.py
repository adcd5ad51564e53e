"""Writes benchmarks/RESULTS.md from all results: `python benchmarks/page.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from checkpoint_page import render_build, render_checkpoints
from choice_page import render_choice, render_reproducible
from controller_page import render_controller
from faults_page import render_faults
from hosts_page import render_hosts
from install_page import render_install
from interfaces_page import (
    render_c_interface,
    render_jax,
    render_jax_hosts,
    render_jax_scatters,
    render_jax_transformer,
    render_mlx,
)
from model_layouts_page import render_model_layouts
from p2p_page import render_p2p
from peers_page import PEERS_PREFIX, render_peers, render_puts
from published_page import render_published
from results_page import render_page
from shared_arrays_page import render_shared_arrays
from simulator_page import render_calibration, render_lab, render_speed
from training_page import PARTS, render_training
from trees_page import render_trees
from vllm_page import render_vllm
from weight_transfer_page import render_weight_transfer

HERE = Path(__file__).parent
APIS = ("native", "torch")
SECTIONS: Mapping[str, tuple[str, Callable[[Any], list[str]]]] = {
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
"""By title: the name of the results file, and the function that renders it."""


def write_page(folder: Path, page: Path) -> None:
    """Writes the page from the results in the folder. Parts without results are omitted."""
    documents = [found for api in APIS for found in _named(folder, f"{api}-").values()]
    sections: dict[str, list[str]] = {}
    if hosts := _named(folder, "hosts-"):
        sections["Several hosts"] = render_hosts(hosts)
    if found := _named(folder, "p2p-"):
        sections["Point-to-point"] = render_p2p(found)
    if found := _named(folder, PEERS_PREFIX):
        sections["Intel MPI"] = render_peers(list(found.values()))
    if found := _named(folder, "controller-"):
        sections["Controller"] = render_controller(found)
    paths = {name: folder / f"{name}.json" for name in PARTS}
    found = {name: json.loads(each.read_text()) for name, each in paths.items() if each.exists()}
    if found:
        sections["Training"] = render_training(found)
    for title, (stem, render) in SECTIONS.items():
        path = folder / f"{stem}.json"
        if path.exists():
            sections[title] = render(json.loads(path.read_text()))
    if found := _named(folder, "vllm-decode-"):
        sections["vLLM on CPUs"] = render_vllm(found)
    if found := _named(folder, "checkpoint-"):
        sections["Checkpoints"] = render_checkpoints(found)
    if runs := sorted(folder.glob("calibration-*.json")):
        sections["Simulator: prediction errors"] = render_calibration(runs)
    trainings = _named(folder, "train-")  # results of `unisono train TASK --json`
    page.write_text(render_page(documents, trainings, sections))


def _named(folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
    """Returns the documents in the files `prefixNAME.json`, by name."""
    return {
        path.stem.removeprefix(prefix): json.loads(path.read_text())
        for path in sorted(folder.glob(f"{prefix}*.json"))
    }


def main(
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = HERE / "results",
    page: Annotated[Path, typer.Option(help="Page to write.")] = HERE / "RESULTS.md",
) -> None:
    write_page(folder, page)


if __name__ == "__main__":
    typer.run(main)
