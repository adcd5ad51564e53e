"""Measures a training step of a small transformer in JAX: Unisono beside JAX's own Gloo.

    pip install jax && python benchmarks/jax_transformer.py

The layouts are data parallelism (each process has a part of the batch) and tensor parallelism (each
has some heads and a part of the hidden layer). JAX inserts all collectives. Each round runs both in
turn, in processes of their own; the losses must be those of one process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jax_collectives import free_address
from rich.progress import track

import unisono
from unisono.bench.machine_facts import describe_machine

KINDS = ("unisono", "gloo")
LAYOUTS = ("data", "tensor")
WORDS, WIDTH, HEADS, HIDDEN, BLOCKS = 512, 256, 8, 1024, 4
BATCH, LENGTH, RATE = 8, 64, 0.5
CHECKED, TIMED = 5, 10
"""Steps whose losses are compared, and steps that are timed."""


def weights() -> dict[str, Any]:
    """Returns equal weights in each process. Blocks are stacked in the first dimension."""
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return (random.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    per_head = WIDTH // HEADS
    return {
        "words": drawn(WORDS, WIDTH),
        "qkv": drawn(BLOCKS, 3, HEADS, WIDTH, per_head),
        "out": drawn(BLOCKS, HEADS, per_head, WIDTH),
        "up": drawn(BLOCKS, WIDTH, HIDDEN),
        "down": drawn(BLOCKS, HIDDEN, WIDTH),
    }


DIVIDED = {"qkv": 2, "out": 1, "up": 2, "down": 1}
"""The dimension that tensor parallelism divides, by weight."""


def loss(weights: dict[str, Any], tokens: Any) -> Any:
    """Returns the mean cross-entropy of the next word; `tokens` are (batch, length + 1)."""
    import jax
    import jax.numpy as jnp

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = weights["words"][inputs]
    later = jnp.triu(jnp.full((LENGTH, LENGTH), -1e9), 1)

    def normed(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    for block in range(BLOCKS):
        q, k, v = jnp.einsum("btd,chde->cbhte", normed(x), weights["qkv"][block])
        scores = jnp.einsum("bhte,bhse->bhts", q, k) / np.sqrt(WIDTH // HEADS) + later
        seen = jnp.einsum("bhts,bhse->bhte", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bhte,hed->btd", seen, weights["out"][block])
        x = x + jax.nn.gelu(normed(x) @ weights["up"][block]) @ weights["down"][block]
    scores = jax.nn.log_softmax(normed(x) @ weights["words"].T)
    return -jnp.take_along_axis(scores, targets[..., None], -1).mean()


def body(kind: str, layout: str, address: str) -> dict[str, Any]:
    """Returns the losses of the first steps, and the seconds of a later one."""
    if kind == "unisono":
        importlib.import_module("unisono.jax")  # before jax
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    with unisono.init() as comm:
        size, rank = comm.size, comm.rank
    if size > 1:
        jax.distributed.initialize(address, size, rank)
    mesh = jax.make_mesh((size,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))

    def placed(x: Any, dim: int | None) -> Any:
        spec = PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "ranks")
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])

    divided = DIVIDED if layout == "tensor" else {}
    state = {name: placed(value, divided.get(name)) for name, value in weights().items()}
    drawn = np.random.default_rng(1).integers(0, WORDS, (BATCH, LENGTH + 1))
    tokens = placed(drawn, 0 if layout == "data" else None)

    @jax.jit
    def step(state: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state, tokens)
        return value, jax.tree.map(lambda w, g: w - RATE * g, state, gradients)

    losses = []
    for _ in range(CHECKED):
        value, state = step(state, tokens)
        losses.append(float(value))
    begin_s = time.perf_counter()
    for _ in range(TIMED):
        value, state = step(state, tokens)
        jax.block_until_ready(state)
    step_s = (time.perf_counter() - begin_s) / TIMED
    if size > 1:
        jax.distributed.shutdown()
    return {"losses": losses, "step_s": step_s}


def one(kind: str, layout: str, ranks: int) -> dict[str, Any]:
    """Runs one round in processes of its own. Returns the figures of rank 0."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    if kind == "gloo":
        environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = kind
    command = [sys.executable, __file__, "--ranks", str(ranks), "--round", kind]
    done = subprocess.run(
        [*command, "--layout", layout], env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{kind}: {done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    ranks: Annotated[list[int], typer.Option(help="Numbers of ranks.")] = [2, 4],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Rounds of each.")] = 5,
    save: Annotated[Path | None, typer.Option(help="A file for the times, as JSON.")] = None,
    round_: Annotated[str | None, typer.Option("--round", hidden=True)] = None,
    layout: Annotated[str, typer.Option(hidden=True)] = "data",
) -> None:
    """Measures a training step of JAX."""
    if round_ is not None:
        words = (round_, layout, free_address())
        found = unisono.run(body, ranks=ranks[0], args=words, bind=True)
        print(json.dumps(found[0]))
        return
    alone = one("gloo", "data", 1)["losses"]
    rows: dict[str, dict[str, list[float]]] = {}
    for count in ranks:
        for divides in LAYOUTS:
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for number in track(range(rounds), description=f"{count} ranks, {divides}"):
                for kind in KINDS[:: 1 - 2 * (number % 2)]:
                    found_one = one(kind, divides, count)
                    np.testing.assert_allclose(found_one["losses"], alone, rtol=2e-5)
                    times[kind].append(found_one["step_s"])
            rows[f"{count} ranks, {divides} parallel"] = times
            medians = ", ".join(f"{kind} {1e3 * np.median(times[kind]):.1f} ms" for kind in KINDS)
            print(
                f"{count} ranks, {divides} parallel: {medians}; the losses are those of one process"
            )
    if save is not None:
        document = {"machine": describe_machine(), "options": {"rounds": rounds}, "rows": rows}
        save.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    typer.run(main)
