"""Measures JAX's `psum` between processes: Unisono beside JAX's own Gloo.

    pip install jax && python benchmarks/jax_collectives.py

Each round runs both in turn, in processes of their own, and checks every result. `--scatter` counts
wrong results of `psum_scatter` of 16 MiB, which Gloo gives in some jaxlibs (jax issue 40830).
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

import unisono
from unisono.bench.machine_facts import describe_machine

SIZES = {8: 500, 1 << 16: 200, 1 << 20: 60, 1 << 24: 10}
"""By bytes: the number of calls in a round."""
KINDS = ("unisono", "gloo")


def body(kind: str, scatters: int, address: str) -> dict[str, float]:
    """Returns the seconds of a `psum` by size, or the number of wrong results of scatters."""
    if kind == "unisono":
        importlib.import_module("unisono.jax")  # before jax
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    with unisono.init() as comm:
        n, rank = comm.size, comm.rank
    jax.distributed.initialize(address, n, rank)
    mesh = jax.make_mesh((n,), ("ranks",))
    split = PartitionSpec("ranks")

    def placed(x: Any) -> Any:
        return jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, split), lambda index: x[index]
        )

    def mapped(function: Any) -> Any:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split))

    found: dict[str, float] = {}
    if scatters:
        count = (1 << 24) // 4
        scatter = mapped(lambda x: jax.lax.psum_scatter(x[0], "ranks", tiled=True)[None])
        wrong = 0
        for number in range(scatters):
            x = np.random.default_rng(number).integers(0, 9, (n, n * count)).astype(np.float32)
            (out,) = scatter(placed(x)).addressable_shards
            expected = x[:, rank * count : (rank + 1) * count].sum(0)
            wrong += not (np.asarray(out.data)[0] == expected).all()
        found["wrong"] = wrong
    else:
        total = mapped(lambda x: jax.lax.psum(x, "ranks")[None][0])
        for nbytes, calls in SIZES.items():
            x = placed(np.full((n, nbytes // 4), rank + 1.0, np.float32))
            (out,) = total(x).addressable_shards
            assert (np.asarray(out.data) == n * (n + 1) / 2).all()
            begin_s = time.perf_counter()
            for _ in range(calls):
                jax.block_until_ready(total(x))
            found[str(nbytes)] = (time.perf_counter() - begin_s) / calls
    jax.distributed.shutdown()
    return found


def free_address() -> str:
    """Returns an address with a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def one(kind: str, ranks: int, scatters: int) -> dict[str, float]:
    """Runs one round in processes of its own. Returns the figures of rank 0."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    if kind != "unisono":
        environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = kind
    command = [sys.executable, __file__, "--round", kind, "--ranks", str(ranks)]
    done = subprocess.run(
        [*command, "--scatter", str(scatters)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    ranks: Annotated[list[int], typer.Option(help="Numbers of ranks.")] = [2, 4],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Rounds of each.")] = 5,
    scatter: Annotated[int, typer.Option(help="Iterations of psum_scatter instead.")] = 0,
    save: Annotated[Path | None, typer.Option(help="A file for the times, as JSON.")] = None,
    round_: Annotated[str | None, typer.Option("--round", hidden=True)] = None,
) -> None:
    """Measures JAX's collectives."""
    if round_ is not None:
        print(
            json.dumps(unisono.run(body, ranks=ranks[0], args=(round_, scatter, free_address()))[0])
        )
        return
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    for count in ranks:
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for number in track(range(rounds), description=f"{count} ranks"):
            for kind in KINDS[:: 1 - 2 * (number % 2)]:
                found[kind].append(one(kind, count, scatter))
        rows[str(count)] = found
        for key in found["unisono"][0]:
            ours, theirs = (np.median([each[key] for each in found[kind]]) for kind in KINDS)
            unit, scale = ("", 1) if key == "wrong" else (" us", 1e6)
            print(f"{count} ranks, {key}: {scale * ours:.1f} and {scale * theirs:.1f}{unit}")
    if save is not None:
        options = {"rounds": rounds, "scatter": scatter}
        save.write_text(
            json.dumps({"machine": describe_machine(), "options": options, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    typer.run(main)
