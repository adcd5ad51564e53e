"""Measures MLX's `all_sum` between processes: Unisono beside MLX's own ring, and Open MPI.

    pip install "mlx[cpu]" && python benchmarks/mlx_collectives.py

Each round runs all in turn, in processes of their own, and checks every result.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

import unisono
from unisono.bench.contestants import mpi_command
from unisono.bench.machine_facts import describe_machine

SIZES = {8: 500, 1 << 16: 200, 1 << 20: 60, 1 << 24: 6, 1 << 26: 3}
"""By bytes: the number of calls in a round."""
KINDS = ("unisono", "ring", "openmpi")


def seconds(kind: str) -> dict[str, float]:
    """Returns the seconds of an `all_sum` by size, on this rank."""
    if kind == "unisono":
        importlib.import_module("unisono.mlx")  # before MLX
    mx: Any = importlib.import_module("mlx.core")
    group = mx.distributed.init(strict=True, backend="ring" if kind == "ring" else "mpi")
    n, found = group.size(), {}
    for nbytes, calls in SIZES.items():
        x = mx.full((nbytes // 4,), group.rank() + 1.0)
        mx.eval(x)
        results = []
        begin_s = 0.0
        for call in range(calls + 1):
            if call == 1:  # the first one is prepared
                begin_s = time.perf_counter()
            results = [mx.distributed.all_sum(x, group=group)]
            mx.eval(results)
        found[str(nbytes)] = (time.perf_counter() - begin_s) / calls
        assert mx.all(results[0] == n * (n + 1) / 2).item()
    return found


def body(kind: str, hosts: str) -> dict[str, float]:
    """Runs a rank of `unisono.run`."""
    if kind == "ring":
        with unisono.init() as comm:
            os.environ["MLX_RANK"] = str(comm.rank)
        os.environ["MLX_HOSTFILE"] = hosts
    return seconds(kind)


def ring_file(ranks: int, folder: str) -> str:
    """Writes the addresses of a ring, whose ports are free now."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    addresses = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in listeners]
    for each in listeners:
        each.close()
    path = Path(folder, "hosts.json")
    path.write_text(json.dumps(addresses))
    return str(path)


def one(kind: str, ranks: int) -> dict[str, float]:
    """Runs one round in processes of its own. Returns the figures of rank 0."""
    command = [sys.executable, __file__, "--ranks", str(ranks), "--round", kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if kind == "openmpi":
        command = list(mpi_command(kind, ranks=ranks, program=command))
        (library,) = (each for each in command if each.startswith("MPI4PY_LIBMPI="))
        environment["MLX_MPI_LIBNAME"] = library.partition("=")[2]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"{kind}: {done.stdout}{done.stderr}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def one_process(kind: str, ranks: int) -> None:
    """Runs the ranks of a round, or this rank of mpiexec, and prints the figures of rank 0."""
    if kind == "openmpi":
        found = seconds(kind)
        if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
            print(json.dumps(found), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(unisono.run(body, ranks=ranks, args=(kind, ring_file(ranks, folder)))[0]))


def main(
    ranks: Annotated[list[int], typer.Option(help="Numbers of ranks.")] = [2, 4],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Rounds of each.")] = 5,
    save: Annotated[Path | None, typer.Option(help="A file for the times, as JSON.")] = None,
    round_: Annotated[str | None, typer.Option("--round", hidden=True)] = None,
) -> None:
    """Measures MLX's collectives."""
    if round_ is not None:
        one_process(round_, ranks[0])
        return
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    for count in ranks:
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for number in track(range(rounds), description=f"{count} ranks"):
            for kind in KINDS[:: 1 - 2 * (number % 2)]:
                found[kind].append(one(kind, count))
        rows[str(count)] = found
        for key in found["unisono"][0]:
            medians = (1e6 * np.median([each[key] for each in found[kind]]) for kind in KINDS)
            texts = (f"{kind} {each:.1f} us" for kind, each in zip(KINDS, medians, strict=True))
            print(f"{count} ranks, {key}: {', '.join(texts)}")
    if save is not None:
        save.write_text(
            json.dumps(
                {"machine": describe_machine(), "options": {"rounds": rounds}, "rows": rows},
                indent=1,
            )
        )


if __name__ == "__main__":
    typer.run(main)
