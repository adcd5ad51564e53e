"""Measures attention over a divided sequence: time, memory, and the hidden part of the exchange.

A call is one causal attention, forward and backward, in float32. The contestants alternate: one
process that holds the whole sequence while the other ranks wait, and the three kinds of
`ContextAttention`. For the ring, the messages alone and the attention alone are also measured. The
part of the exchange that the attention hides is (exchange + attention - ring) / exchange. It uses
the fastest rounds, which other programs disturb least. Memory is the growth of a rank's resident
memory, the maximum of all ranks. It is measured at the peak of a call, and between forward and
backward. Before the measurement, every rank compares its output with one process, which is also the
warm-up.

The network `memory` has all ranks on this host. The network `1gbit` has each rank on a separate lab
host (requires root).

    python benchmarks/context_attention.py                       # about 15 minutes
    python benchmarks/context_attention.py --lengths 1024,4096 --rounds 3 --networks memory
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from context_attention_rank import ATTENTION, EXCHANGE, HEAD_DIM, HEADS, KV_HEADS, WHOLE, Row
from rich.console import Console
from rich.table import Table

from unisono.bench.lab import Lab
from unisono.bench.machine_facts import busy_cores, describe_machine, usable_cores
from unisono.parallel.context import CONTEXT_KINDS

PORT = 29_461
END_S = 1800.0
_RANK_FILE = str(Path(__file__).with_name("context_attention_rank.py"))


def run_ranks(network: str, ranks: int, task: dict[str, Any]) -> list[Row]:
    """Runs a task on ranks that shared memory or a lab network connects. Raises RuntimeError with a
    failing rank's last output.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        task = {**task, "network": network, "path": str(folder / "rows.json")}
        lab = None if network == "memory" else stack.enter_context(Lab(hosts=ranks, rate=network))
        started = stack.enter_context(_killed_at_exit())
        address = "127.0.0.1" if lab is None else lab.address(0)
        for rank in range(ranks):
            words = [
                "env", f"RANK={rank}", f"WORLD_SIZE={ranks}", f"MASTER_ADDR={address}",
                f"MASTER_PORT={PORT}", "OMP_NUM_THREADS=1",
                sys.executable, _RANK_FILE, json.dumps(task),
            ]  # fmt: skip
            placed = words if lab is None else lab.command(rank, words)
            log = stack.enter_context((folder / f"{rank}.log").open("w"))
            started.append(subprocess.Popen(placed, stdout=log, stderr=log))
        for rank, process in enumerate(started):
            if process.wait(timeout=END_S):
                said = (folder / f"{rank}.log").read_text()[-2000:]
                raise RuntimeError(f"rank {rank} of {ranks} failed:\n{said}")
        return [Row(**row) for row in json.loads((folder / "rows.json").read_text())]


@contextmanager
def _killed_at_exit() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yields a list. Processes that the caller adds to it are killed at the end of the `with`
    block.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def render(rows: Sequence[Row], busy: float) -> Table:
    """Returns a table with medians over the rounds."""
    table = Table(
        title=f"causal attention, forward and backward, {HEADS} heads, {KV_HEADS} of keys, width "
        f"{HEAD_DIM}, float32; MiB: peak / kept after forward\n"
        f"{usable_cores()} cores, of which other programs used {busy:.1f} before the start"
    )
    table.add_column("network")
    names = (WHOLE, *CONTEXT_KINDS)
    parts = (EXCHANGE, ATTENTION)
    columns = ["ranks", "length", *(f"{name} ms" for name in (*names, *parts)), "hidden"]
    for column in (*columns, *(f"{name} MiB" for name in names)):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.network,
            str(row.ranks),
            str(row.length),
            *(f"{row.median_s(name) * 1e3:.1f}" for name in (*names, *parts)),
            "-" if row.hidden is None else f"{row.hidden:.0%}",
            *(f"{_mebi(row.peak_bytes[name])} / {_mebi(row.kept_bytes[name])}" for name in names),
        )
    return table


def _mebi(size: int) -> str:
    return f"{size / (1 << 20):.1f}"


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    networks: Annotated[
        str, typer.Option(help="memory, or the rate of a lab's links, such as 1gbit.")
    ] = "memory,1gbit",
    lengths: Annotated[str, typer.Option(help="Positions of the whole sequence.")] = (
        "1024,2048,4096,8192,16384"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Most rounds of a length.")] = 11,
    length_s: Annotated[float, typer.Option(help="Approximate seconds of a length.")] = 30.0,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "context-attention.json",
) -> None:
    busy = busy_cores(1.0)
    task = {
        "lengths": [int(each) for each in lengths.split(",")],
        "rounds": rounds,
        "length_s": length_s,
    }
    rows = [
        row
        for network in networks.split(",")
        for count in ranks.split(",")
        for row in run_ranks(network, int(count), task)
    ]
    Console(width=int(os.environ.get("COLUMNS", "180"))).print(render(rows, busy))
    document = {
        "machine": describe_machine(),
        "busy_cores": busy,
        "rows": [{**asdict(row), "hidden": row.hidden} for row in rows],
    }
    json_path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
