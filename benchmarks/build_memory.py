"""Peak memory of a rank that builds its part of a model: `python benchmarks/build_memory.py`.

Ranks divide a model on the device meta by ZeRO-3, with values from a seed, and from files of
safetensors. For comparison, they divide the same model from the memory of the CPU. A rank's peak is
the largest resident memory (`VmHWM`) while `parallelize` runs, without what the process had before.
A rank has an equal part of the weights, and may need in addition one block, such as a layer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn

import unisono
from unisono.bench.machine_facts import describe_machine
from unisono.parallel import Layout, ParallelRun, parallelize

WIDTH, MB = 2048, 1e6
BAR = 1.3


def make_model(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def write_files(folder: Path, layers: int) -> None:
    """Writes the weights, one file for sixteen layers."""
    torch.manual_seed(0)
    for first in range(0, layers, 16):
        numbers = range(first, min(first + 16, layers))
        tensors = {f"{number}.weight": torch.randn(WIDTH, WIDTH) / 50 for number in numbers}
        save_file(tensors, folder / f"model-{first:05}.safetensors")


def resident(line: str) -> int:
    """Returns the bytes of a line of the process's status, such as VmRSS."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(text.split(f"{line}:")[1].split()[0])


def peak_of(action: Callable[[], object]) -> tuple[int, int]:
    """Returns by how many bytes the resident memory grew at most, and in the end."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the former peak
    kept = action()
    found = resident("VmHWM") - before, resident("VmRSS") - before
    del kept
    return found


def measure(kind: str, layers: int, folder: str) -> dict[str, Any]:
    """Returns the bytes of a rank."""
    dist.init_process_group("unisono")
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    dist.barrier()

    def build(count: int, weights: str | None = None) -> ParallelRun:
        torch.manual_seed(0)
        with torch.device("cpu" if kind == "cpu" else "meta"):
            model = make_model(count)
        return parallelize(
            model,
            Layout(dp=ranks, zero=3),
            loss=nn.MSELoss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4),
            weights=weights,
        )

    build(1).mesh.close()  # imports modules
    if kind == "files":
        import_module("unisono.parallel.checkpoint.safetensors_folder")
    peak, end = peak_of(lambda: build(layers, folder if kind == "files" else None))
    dist.destroy_process_group()
    return {"peak": peak, "end": end}


def main(
    weights_gb: Annotated[float, typer.Option(help="bytes of the weights")] = 1.0,
    ranks: int = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="file for the numbers")] = None,
) -> None:
    block = 4 * WIDTH * WIDTH
    layers = max(round(weights_gb * 1e9 / block), 1)
    part = layers * block / ranks
    table = Table("values from", "peak MB", "end MB", "(peak - block) / part",
                  title=f"{layers * block / MB:.0f} MB of weights, {ranks} ranks, ZeRO-3: part "
                  f"{part / MB:.0f} MB, block {block / MB:.0f} MB")  # fmt: skip
    found: dict[str, Any] = {"machine": describe_machine(), "part": part, "block": block}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), layers)
        for kind in ("files", "seed", "cpu"):
            rows = unisono.run(measure, ranks=ranks, args=(kind, layers, folder))
            peak, end = (max(each[name] for each in rows) for name in ("peak", "end"))
            ratio = (peak - block) / part
            found[kind] = {"peak": peak, "end": end, "ratio": ratio}
            table.add_row(kind, f"{peak / MB:.0f}", f"{end / MB:.0f}", f"{ratio:.2f}")
    Console().print(table)
    print(f"expected for files and seed: at most {BAR}")
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
