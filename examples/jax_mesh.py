"""JAX on several CPU processes, whose collectives run on Unisono.

Covers: `unisono.jax`, a `shard_map` with `psum`, and a `jit` whose collectives JAX inserts.
Scenario: four processes fit a line to data of which each has a quarter. The results are those of
NumPy on one process.
Needs: jax

    python examples/jax_mesh.py                                       # starts four ranks
    torchrun --standalone --nproc-per-node 4 examples/jax_mesh.py
"""

import os

import numpy as np

RANKS, ROWS, COLUMNS, STEPS, RATE = 4, 64, 8, 20, 0.1


def data():
    random = np.random.default_rng(0)
    inputs = random.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    return inputs, inputs @ np.arange(COLUMNS, dtype=np.float32)


def fit():
    import unisono.jax  # isort: skip # before jax

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    unisono.jax.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    inputs, targets = data()
    split, whole = PartitionSpec("data"), PartitionSpec()

    def shared(x, spec):
        return jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, spec), lambda index: x[index]
        )

    x, y = shared(inputs, split), shared(targets, split)

    def loss(weights, x, y):
        return jnp.mean((x @ weights - y) ** 2)

    @jax.jit
    def step(weights, x, y):  # JAX sums the gradients of the processes
        return weights - RATE * jax.grad(loss)(weights, x, y)

    weights = shared(np.zeros(COLUMNS, np.float32), whole)
    for _ in range(STEPS):
        weights = step(weights, x, y)
    total = jax.jit(
        jax.shard_map(
            lambda y: jax.lax.psum(jnp.sum(y), "data"), mesh=mesh, in_specs=split, out_specs=whole
        )
    )(y)
    result = np.asarray(weights), float(total)
    jax.distributed.shutdown()
    return result


def fit_alone():
    inputs, targets = data()
    weights = np.zeros(COLUMNS, np.float32)
    for _ in range(STEPS):
        weights -= RATE * 2 / ROWS * inputs.T @ (inputs @ weights - targets)
    return weights, targets.sum()


def check(result):
    for found, expected in zip(result, fit_alone(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    print(f"weights {np.round(result[0], 2)}, sum {result[1]:.4f}: those of one process")


if __name__ == "__main__":
    if "RANK" in os.environ:
        check(fit())
    else:
        import unisono

        check(unisono.run(fit, ranks=RANKS)[0])
