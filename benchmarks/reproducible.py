"""What does reproducible=True cost on one host? Two communicators of the same ranks take turns.

python benchmarks/reproducible.py                         # 2 and 4 ranks, about two minutes
python benchmarks/reproducible.py --ranks 2 --ops scan --sizes 64K,1M
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

import unisono
from unisono.bench.machine import describe_machine
from unisono.bench.probe import describe_latency, probe_core_latency_s
from unisono.bench.sizes import format_size, parse_sizes
from unisono.communicator import Communicator

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds a call, of the slowest rank, one entry per turn; `nbytes` of the larger buffer."""

    op: str
    ranks: int
    dtype: str
    nbytes: int
    default_s: tuple[float, ...]
    reproducible_s: tuple[float, ...]

    @property
    def price(self) -> float:
        """How many times longer a reproducible call takes."""
        return median(self.reproducible_s) / median(self.default_s)


# ---- a rank


def measure(ops: list[str], sizes: list[int], rounds: int, round_s: float) -> list[Row]:
    """All rows of one number of ranks. Runs on every rank."""
    torch.set_num_threads(1)
    with unisono.init() as usual:
        name = np.frombuffer(secrets.token_bytes(16), np.uint8).copy()
        meeting = usual.broadcast(name).tobytes().hex()
        with unisono.init(usual.rank, usual.size, meeting, reproducible=True) as strict:
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
                often = int(round_s / max(time_s(comms[0], call, 3) for call in calls))
                often = min(1000, max(1, often))
                times: tuple[list[float], list[float]] = ([], [])
                for turn in range(rounds):
                    for which in (0, 1) if turn % 2 else (1, 0):
                        times[which].append(time_s(comms[0], calls[which], often))
                yield Row(
                    op=op, ranks=comms[0].size, dtype=dtype, nbytes=nbytes,
                    default_s=tuple(times[0]), reproducible_s=tuple(times[1]),
                )  # fmt: skip


def prepare(comm: Communicator, op: str, x: torch.Tensor) -> Callable[[], object]:
    """A call on zeros, so that sums stay what they are; after one whose result is right here."""
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


def time_s(comm: Communicator, call: Callable[[], object], often: int) -> float:
    """Seconds a call, back to back, of the slowest rank."""
    comm.barrier()
    start_s = time.perf_counter()
    for _ in range(often):
        call()
    took_s = np.array([(time.perf_counter() - start_s) / often])
    return float(comm.all_reduce(took_s, "max")[0])


# ---- the program


def _microseconds(times_s: tuple[float, ...]) -> str:
    first, _, third = quantiles(times_s, n=4, method="inclusive")
    return f"{median(times_s) * 1e6:.0f} ({first * 1e6:.0f}-{third * 1e6:.0f})"


def render(rows: list[Row], probes_s: list[float]) -> Table:
    """Median and quartiles over the turns."""
    table = Table(title=f"us a call; cores {describe_latency(probes_s)} ns")
    for name in ("op", "ranks", "type"):
        table.add_column(name)
    for name in ("bytes", "default", "reproducible", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        times = map(_microseconds, (row.default_s, row.reproducible_s))
        cells = (row.op, str(row.ranks), row.dtype, format_size(row.nbytes), *times)
        table.add_row(*cells, f"{row.price:.2f}")
    return table


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    ops: Annotated[
        str, typer.Option(help="Operations that reduce.")
    ] = "all_reduce,reduce,reduce_scatter,scan",
    sizes: Annotated[str, typer.Option(help="As for unisono bench.")] = "64K,256K,1M,16M,64M",
    rounds: Annotated[int, typer.Option(min=2, help="Turns of each communicator.")] = 11,
    round_s: Annotated[float, typer.Option(help="About how long a turn takes.")] = 0.02,
    json_path: Annotated[
        Path, typer.Option("--json", help="Where to write everything measured.")
    ] = Path(__file__).parent / "results" / "reproducible.json",
) -> None:
    rows: list[Row] = []
    probes_s: list[float] = []
    for count in map(int, ranks.split(",")):
        probe_s = probe_core_latency_s()
        probes_s += [] if probe_s is None else [probe_s]
        arguments = (ops.split(","), list(parse_sizes(sizes)), rounds, round_s)
        rows += unisono.run(measure, ranks=count, args=arguments)[0]
    Console(width=120).print(render(rows, probes_s))
    document = {
        "machine": describe_machine(),
        "probes_s": probes_s,
        "rows": [asdict(row) for row in rows],
    }
    json_path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
