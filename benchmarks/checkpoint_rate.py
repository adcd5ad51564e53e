"""Checkpoints of a run beside plain files: `python benchmarks/checkpoint_rate.py`.

Ranks divide a model and its optimizer by ZeRO-3. In turns, they save a checkpoint, and each writes
as many bytes of its weights with plain `write` and `fsync`. All bytes are on the disk at the end of
a turn. After each save, the weights are set to zero and loaded, and every element is compared.
Then steps take turns, without a save and beside one whose thread writes. The optimizer's states
come in addition to `--weights-gb`: twice as many bytes for AdamW, none for SGD.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import distributed as dist
from torch import nn

import unisono
from unisono.bench.machine_facts import describe_machine
from unisono.parallel import Layout, ParallelRun, parallelize

WIDTH = 2048
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-4),
}


def slowest_s(action: Callable[[], object]) -> float:
    """Returns the seconds that the slowest rank needs."""
    dist.barrier()
    begin_s = time.perf_counter()
    action()
    return _largest(time.perf_counter() - begin_s)


def make_run(options: dict[str, Any], ranks: int) -> ParallelRun:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the ranks build the same model and pass the same batch
    layers = max(round(options["weights_gb"] * 1e9 / (4 * WIDTH * WIDTH)), 1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return parallelize(
        model,
        Layout(dp=ranks, zero=3),
        loss=nn.MSELoss(),
        optimizer=OPTIMIZERS[options["optimizer"]],
    )


def own_values(run: ParallelRun) -> list[torch.Tensor]:
    """Returns this rank's parts of the weights."""
    held = [each.values.detach() for group in run.sets for each in group.held]
    return [getattr(each, "to_local", lambda each=each: each)() for each in held]


def write_plain(path: Path, nbytes: int, values: list[torch.Tensor]) -> None:
    """Writes so many bytes of the values to a file, again and again if needed, and to the disk."""
    views = [memoryview(each.numpy()).cast("B") for each in values]
    with (path / f"{dist.get_rank()}").open("wb", buffering=0) as file:
        for view in cycle(views):
            if nbytes <= 0:
                break
            nbytes -= file.write(view[:nbytes]) or 0
        os.fsync(file.fileno())


def verify(run: ParallelRun, folder: Path) -> None:
    """Loads a checkpoint into weights that are zero, and compares every element."""
    values = own_values(run)
    kept = [each.clone() for each in values]
    for each in values:
        each.zero_()
    run.load(folder)
    assert all(map(torch.equal, kept, own_values(run)))


def time_write(run: ParallelRun, which: str, path: Path, own: int) -> float:
    """Returns the seconds of a save, or of plain files of `own` bytes on this rank."""
    path.mkdir(exist_ok=True)
    if which == "save":
        found = slowest_s(lambda: run.save(path))
        verify(run, path)
    else:
        values = own_values(run)
        found = slowest_s(lambda: write_plain(path, own, values))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return found


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the times of all turns of a rank."""
    dist.init_process_group("unisono")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = make_run(options, ranks)
    folder = Path(options["folder"])
    batch = torch.ones(options["samples"] * ranks, WIDTH)
    run.step(batch, batch)
    found: dict[str, Any] = {"plain": [], "save": [], "step": [], "step beside": [], "blocked": []}
    saved = folder / "saved"
    run.save(saved)  # makes the files whose sizes the plain files have
    own = sum(each.stat().st_size for each in saved.rglob(f"__{rank}_*.distcp"))
    total = torch.tensor(own)
    dist.all_reduce(total)
    found["nbytes"] = int(total)
    time_write(run, "plain", folder / "first", own)  # touches the memory of the files
    for turn in range(options["turns"]):
        for which in ("plain", "save") if turn % 2 else ("save", "plain"):
            found[which].append(time_write(run, which, folder / f"{which} {turn}", own))
    for _ in range(options["turns"]):
        found["step"].append(slowest_s(lambda: run.step(batch, batch)))
        pending = run.async_save(saved)
        found["blocked"].append(_largest(pending.blocked_s))
        found["step beside"].append(slowest_s(lambda: run.step(batch, batch)))
        pending.wait()
    run.save(saved)
    verify(run, saved)
    dist.destroy_process_group()
    return found


def _largest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def show(found: dict[str, Any], options: dict[str, Any]) -> None:
    """Prints the rates, the ratio of each turn, and the times of steps."""
    console, gb = Console(), found["nbytes"] / 1e9
    table = Table("turn", "plain files GB/s", "checkpoint GB/s", "ratio", title=f"{gb:.2f} GB")
    ratios = []
    for turn, (plain, save) in enumerate(zip(found["plain"], found["save"], strict=True)):
        ratios.append(plain / save)
        table.add_row(str(turn), f"{gb / plain:.2f}", f"{gb / save:.2f}", f"{ratios[-1]:.2f}")
    console.print(table)
    step, blocked = median(found["step"]), median(found["blocked"])
    console.print(f"median ratio {median(ratios):.2f}")
    console.print(
        f"step {step:.2f} s, beside a thread that writes {median(found['step beside']):.2f} s; "
        f"blocked for {blocked:.3f} s = {blocked / step:.1%} of a step "
        f"({options['samples']} samples by rank)"
    )


def main(
    *,
    ranks: Annotated[int, typer.Option(help="Ranks of the run.")] = 4,
    weights_gb: Annotated[float, typer.Option(help="GB of weights.")] = 1.0,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    samples: Annotated[int, typer.Option(help="Samples of each rank in a step.")] = 256,
    turns: Annotated[int, typer.Option(help="Turns of each kind.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to measure.")] = None,
    save: Annotated[Path | None, typer.Option(help="A file for the times, as JSON.")] = None,
) -> None:
    """Measures checkpoints beside plain files."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        options = {
            "weights_gb": weights_gb, "optimizer": optimizer, "samples": samples,
            "turns": turns, "folder": name,
        }  # fmt: skip
        found = unisono.run(measure, ranks=ranks, args=(options,))[0]
    show(found, options)
    if save is not None:
        facts = {"machine": describe_machine(), "options": options, **found}
        save.write_text(json.dumps(facts, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
