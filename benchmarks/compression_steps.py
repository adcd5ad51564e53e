"""Compares the time of training steps with and without compressed gradients.

Both kinds of steps train the same model on the same ranks and alternate. In the rows *shared
memory*, ranks use their own communicators. In the rows *link*, `LinkTransfer` makes every message
between two ranks take the time of a slower link (`--link-us` and `--link-gbit`). The bytes are
those that a rank submits in a step, so they do not depend on the algorithm of a collective.

    python benchmarks/compression_steps.py                  # 2 and 4 ranks, about 2 minutes
    python benchmarks/compression_steps.py --ranks 2 --rounds 5
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from timing import alternate, calls_within, microseconds, on_every, write
from torch import nn

import unisono
from unisono.communicator import Communicator
from unisono.communicator.explain import time_s
from unisono.controller import CommunicatorTransfer, Controller, LinkCost, LinkTransfer
from unisono.parallel import Bf16, Compression, Fp16, Int8, PowerSGD, TopK, data_parallel

WIDTH, LAYERS, ROWS = 512, 6, 32
WARM_UP_STEPS = 6
COMPRESSIONS: tuple[Compression, ...] = (
    Fp16(),
    Bf16(),
    PowerSGD(rank=4),
    Int8(),
    TopK(fraction=0.01),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds per step of the slowest rank, one entry per round, and bytes that one rank submits in
    a step.
    """

    name: str
    wire: str
    ranks: int
    compressed_s: tuple[float, ...]
    dense_s: tuple[float, ...]
    compressed_bytes: int
    dense_bytes: int

    @property
    def ratio(self) -> float:
        """Median over the rounds of this ratio: the time of a compressed step, divided by that of a
        step without compression.
        """
        pairs = zip(self.compressed_s, self.dense_s, strict=True)
        return median(compressed_s / dense_s for compressed_s, dense_s in pairs)


# ---- code that runs on each rank


def make_model() -> nn.Module:
    """Returns a network of square layers, 1.6 million parameters."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


class Trainer:
    """Trains a copy of a model, with one kind of compression of its gradients, or with none."""

    def __init__(
        self, comm: Communicator, model: nn.Module, compression: Compression | None, link: Any
    ) -> None:
        transfer = CommunicatorTransfer.over(comm)
        self.controller = Controller(
            comm, transfer=transfer if link is None else LinkTransfer(transfer, link)
        )
        self.model = data_parallel(
            copy.deepcopy(model), comm, controller=self.controller, compression=compression
        )
        self._optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self._x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(comm.rank))

    def step(self) -> None:
        """Runs one training step: forward, backward with the exchange, and optimizer."""
        self._optimizer.zero_grad()
        self.model(self._x).square().mean().backward()
        self._optimizer.step()

    def step_bytes(self) -> int:
        """Runs one training step. Returns the bytes that this rank submitted."""
        before = self.controller.stats().bytes
        self.step()
        return self.controller.stats().bytes - before

    def close(self) -> None:
        """Closes the model, then its controller."""
        self.model.close()
        self.controller.close()


def measure(rounds: int, round_s: float, link_us: float, link_gbit: float) -> list[Row]:
    """Measures all table rows for one number of ranks. Every rank calls this function."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model()
    link = LinkCost(latency_s=link_us * 1e-6, s_per_byte=8e-9 / link_gbit)
    with unisono.init() as comm:
        # The simulated link takes the time for the submitted bytes. A real link would carry exactly
        # these bytes only between two ranks, so the link is simulated only there.
        wires = {"shared memory": None, **({"link": link} if comm.size == 2 else {})}
        return [
            row
            for wire, cost in wires.items()
            for row in _rows(comm, model, wire, cost, rounds, round_s)
        ]


def _rows(
    comm: Communicator, model: nn.Module, wire: str, link: Any, rounds: int, round_s: float
) -> Iterator[Row]:
    for compression in COMPRESSIONS:
        trainers = [Trainer(comm, model, each, link) for each in (compression, None)]
        steps: list[Callable[[], object]] = [trainer.step for trainer in trainers]
        for _ in range(WARM_UP_STEPS):
            for step in steps:
                step()
        often = [calls_within(round_s, time_s(comm, step, 2)) for step in steps]
        compressed_s, dense_s = alternate(comm, steps, often, rounds)
        compressed_bytes, dense_bytes = (trainer.step_bytes() for trainer in trainers)
        for trainer in trainers:
            trainer.close()
        yield Row(
            name=repr(compression), wire=wire, ranks=comm.size,
            compressed_s=compressed_s, dense_s=dense_s,
            compressed_bytes=compressed_bytes, dense_bytes=dense_bytes,
        )  # fmt: skip


# ---- the main program


def render(rows: Sequence[Row]) -> Table:
    """Returns a table with medians and quartiles over the rounds."""
    table = Table(title="us a step")
    for name in ("compression", "wire"):
        table.add_column(name)
    for name in ("ranks", "compressed", "dense", "ratio", "kB", "dense kB", "bytes ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.name.split("(")[0],
            row.wire,
            str(row.ranks),
            microseconds(row.compressed_s),
            microseconds(row.dense_s),
            f"{row.ratio:.2f}",
            f"{row.compressed_bytes / 1e3:.0f}",
            f"{row.dense_bytes / 1e3:.0f}",
            f"{row.compressed_bytes / row.dense_bytes:.3f}",
        )
    return table


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each method.")] = 11,
    round_s: Annotated[float, typer.Option(help="Approximate seconds of a round.")] = 0.2,
    link_us: Annotated[float, typer.Option(help="Latency of the link, microseconds.")] = 50.0,
    link_gbit: Annotated[float, typer.Option(help="Bandwidth of the link, Gbit/s.")] = 1.0,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "compression-steps.json",
) -> None:
    rows, probes_s = on_every(ranks, measure, (rounds, round_s, link_us, link_gbit))
    Console(width=120).print(render(rows))
    write(json_path, rows, probes_s)


if __name__ == "__main__":
    typer.run(main)
