"""Measures the cost of reproducible=True on one host. A reproducible and a default communicator of
the same ranks alternate.

python benchmarks/reproducible.py                         # 2 and 4 ranks, about four minutes
python benchmarks/reproducible.py --ranks 2 --ops scan --sizes 64K,1M
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from timing import alternate, calls_within, microseconds, on_every, write

import unisono
from unisono.bench.core_latency import describe_latency
from unisono.bench.sizes import format_size, parse_sizes
from unisono.communicator import Communicator
from unisono.communicator.explain import time_s

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds per call of the slowest rank, one entry per round; `nbytes` is the size of the input
    or the output, whichever is larger.
    """

    op: str
    ranks: int
    dtype: str
    nbytes: int
    default_s: tuple[float, ...]
    reproducible_s: tuple[float, ...]

    @property
    def price(self) -> float:
        """Median ratio of a reproducible call's time to a default call's. Each round gives one
        ratio, because the latency between cores may change.
        """
        pairs = zip(self.reproducible_s, self.default_s, strict=True)
        return median(strict_s / usual_s for strict_s, usual_s in pairs)


def merged(rows: Sequence[Row]) -> Row:
    """Merges the rounds of several groups of ranks into one row."""
    return replace(
        rows[0],
        default_s=tuple(chain.from_iterable(row.default_s for row in rows)),
        reproducible_s=tuple(chain.from_iterable(row.reproducible_s for row in rows)),
    )


# ---- code that runs on each rank


def measure(ops: list[str], sizes: list[int], rounds: int, round_s: float) -> list[Row]:
    """Measures all table rows for one number of ranks. Every rank calls this function."""
    torch.set_num_threads(1)
    with unisono.init() as usual:
        name = np.frombuffer(secrets.token_bytes(16), np.uint8).copy()
        rendezvous = usual.broadcast(name).tobytes().hex()
        with unisono.init(usual.rank, usual.size, rendezvous, reproducible=True) as strict:
            return list(_rows((usual, strict), ops, sizes, rounds, round_s))


def _rows(
    comms: tuple[Communicator, Communicator],
    ops: list[str],
    sizes: list[int],
    rounds: int,
    round_s: float,
) -> Iterator[Row]:
    for op in ops:
        for dtype in DTYPES:
            for nbytes in sizes:
                kind: Any = getattr(torch, dtype)
                x = torch.empty(nbytes // kind.itemsize, dtype=kind)
                calls = [prepare(comm, op, x) for comm in comms]
                often = calls_within(round_s, max(time_s(comms[0], call, 3) for call in calls))
                default_s, reproducible_s = alternate(comms[0], calls, (often, often), rounds)
                yield Row(
                    op=op, ranks=comms[0].size, dtype=dtype, nbytes=nbytes,
                    default_s=default_s, reproducible_s=reproducible_s,
                )  # fmt: skip


def prepare(comm: Communicator, op: str, x: torch.Tensor) -> Callable[[], object]:
    """Checks the result of one call. Returns a function that repeats the call on zeros, whose sums
    stay zero.
    """
    function = getattr(comm, op)
    x.fill_(1)
    out = function(x)
    if op != "reduce" or comm.rank == 0:
        summands = comm.rank + 1 if op == "scan" else comm.size
        assert bool((out == summands).all()), op
    x.zero_()
    if op == "reduce_scatter":
        return lambda: function(x, out)
    return lambda: function(x)


# ---- the main program


def render(rows: list[Row], probes_s: list[float]) -> Table:
    """Returns a table with medians and quartiles over the rounds."""
    table = Table(title=f"us a call; cores {describe_latency(probes_s)} ns")
    for name in ("op", "ranks", "type"):
        table.add_column(name)
    for name in ("bytes", "default", "reproducible", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        times = map(microseconds, (row.default_s, row.reproducible_s))
        cells = (row.op, str(row.ranks), row.dtype, format_size(row.nbytes), *times)
        table.add_row(*cells, f"{row.price:.2f}")
    return table


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    ops: Annotated[
        str, typer.Option(help="Reductions to measure, separated by commas.")
    ] = "all_reduce,reduce,reduce_scatter,scan",
    sizes: Annotated[
        str, typer.Option(help=("Message sizes, as for unisono bench."))
    ] = "64K,256K,1M,16M,64M",
    worlds: Annotated[
        int,
        typer.Option(
            min=1, help=("Repetitions with new processes, which differ in memory and cores.")
        ),
    ] = 5,
    rounds: Annotated[
        int, typer.Option(min=2, help=("Rounds of each communicator in each repetition."))
    ] = 11,
    round_s: Annotated[float, typer.Option(help="Approximate seconds of a round.")] = 0.02,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "reproducible.json",
) -> None:
    arguments = (ops.split(","), list(parse_sizes(sizes)), rounds, round_s)
    runs = [on_every(ranks, measure, arguments) for _ in range(worlds)]
    rows = [merged(same) for same in zip(*(rows for rows, _ in runs), strict=True)]
    probes_s = [probe_s for _, probes_s in runs for probe_s in probes_s]
    Console(width=120).print(render(rows, probes_s))
    write(json_path, rows, probes_s)


if __name__ == "__main__":
    typer.run(main)
