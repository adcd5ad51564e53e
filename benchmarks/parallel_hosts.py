"""Compares data-parallel training steps of `parallelize` with `data_parallel` and torch's DDP, on
two hosts of a lab whose link limits the step.

The contestants train the same model on the same batches, alternate, and must agree in their losses
and, after the measurement, in their weights. *after the passes* is `parallelize` with
`overlap=False`.

    python benchmarks/parallel_hosts.py                  # root; three minutes
    python benchmarks/parallel_hosts.py --rounds 5 --rate 10gbit
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from step_rows import PARALLELIZE, Row, Step, measured_row, render
from timing import write
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.bench.lab import Lab
from unisono.parallel import Layout, data_parallel, draw_weights, parallelize

HOSTS, PORT = 2, 29_431
WIDTH, LAYERS, ROWS = 1024, 8, 512
RATE = 1e-3
AGREEMENT = 1e-5
"""Relative to the largest change of a weight."""


class Contestant:
    """A model and its training step."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        self.model, self.step = model, step


def make_model() -> nn.Sequential:
    """Returns a chain of layers with gradients of 33.6 MB."""
    modules: list[nn.Module] = []
    for _ in range(LAYERS):
        modules += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = nn.Sequential(*modules)
    draw_weights(model, 0)
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, RATE, momentum=0.9)


def ours(model: nn.Module, batch: list[torch.Tensor], layout: Layout, **options: Any) -> Contestant:
    """Returns a step of `parallelize`."""
    run = parallelize(model, layout, loss=nn.functional.mse_loss, optimizer=sgd, **options)
    return Contestant(model, lambda: float(run.step(*batch)))


def wrapped(
    model: nn.Module, batch: list[torch.Tensor], wrap: Callable[[nn.Module], nn.Module]
) -> Contestant:
    """Returns a step of a model that averages its gradients in its backward pass."""
    replica, optimizer = wrap(model), sgd(model.parameters())
    inputs, targets = (each.chunk(HOSTS)[dist.get_rank()] for each in batch)

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(replica(inputs), targets)
        loss.backward()
        optimizer.step()
        total = loss.detach() / HOSTS
        dist.all_reduce(total)
        return float(total)

    return Contestant(model, step)


def verify(found: dict[str, Contestant], before: nn.Module) -> None:
    """Raises `AssertionError` if contestants or ranks have different weights."""
    for name, first in before.named_parameters():
        values = {who: each.model.get_parameter(name).detach() for who, each in found.items()}
        expected = values["data_parallel"].clone()
        change = float((expected - first.detach()).abs().max())
        dist.broadcast(expected, 0)
        for who, each in values.items():
            error = float((each - expected).abs().max())
            if error > AGREEMENT * change:
                raise AssertionError(f"{name}: {who} differs by {error} of {change}")


def measure(rounds: int, steps: int) -> list[Row]:
    """Measures all strategies. Runs on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("unisono")
    before = make_model()
    batch = [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)]

    def made() -> nn.Module:
        return copy.deepcopy(before)

    rows = []
    for name, layout in (("data", Layout(dp=HOSTS)), ("zero-1", Layout(dp=HOSTS, zero=1))):
        found = {
            PARALLELIZE: ours(made(), batch, layout),
            "data_parallel": wrapped(made(), batch, data_parallel),
            "after the passes": ours(made(), batch, layout, overlap=False),
            "DDP": wrapped(made(), batch, DistributedDataParallel),
        }
        steps_of = {who: each.step for who, each in found.items()}
        rows.append(measured_row(name, f"{LAYERS} layers", steps_of, rounds, steps))
        verify(found, before)
    dist.barrier()
    return rows


def collect(rate: str, rounds: int, steps: int) -> list[Row]:
    """Runs a rank on each host of a lab. Returns the rows that rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder, Lab(hosts=HOSTS, rate=rate) as lab:
        result = Path(folder) / "rows.json"
        words = [sys.executable, __file__, "--rounds", str(rounds), "--steps", str(steps)]
        common = {
            "WORLD_SIZE": str(HOSTS),
            "MASTER_ADDR": lab.address(0),
            "MASTER_PORT": str(PORT),
            "UNISONO_JOB_SECRET": f"parallel-hosts-{os.getpid()}",
            "OMP_NUM_THREADS": "1",
        }
        ranks = [
            lab.start(
                host,
                [*words, "--result", str(result)],
                {**os.environ, **common, "RANK": str(host)},
            )
            for host in range(HOSTS)
        ]
        try:
            codes = [each.wait(1200) for each in ranks]
        finally:
            for each in ranks:
                each.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with codes {codes}: see their output")
        return [Row(**row) for row in json.loads(result.read_text())]


def main(
    *,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each contestant.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a round.")] = 5,
    rate: Annotated[str, typer.Option(help="Rate of the links.")] = "1gbit",
    result: Annotated[Path | None, typer.Option(hidden=True)] = None,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "parallel-hosts.json",
) -> None:
    if result is not None:  # this process is one of the ranks
        rows = measure(rounds, steps)
        if os.environ["RANK"] == "0":
            result.write_text(json.dumps([asdict(row) for row in rows]))
        return
    rows = collect(rate, rounds, steps)
    Console(width=160).print(render(rows))
    write(json_path, rows, [])


if __name__ == "__main__":
    typer.run(main)
