"""MLX on several CPU processes, whose collectives run on Unisono.

Covers: `unisono.mlx`, `all_sum` and `all_gather`.
Scenario: two processes fit a line to data of which each has a half, and average their gradients.
The results are those of NumPy on one process.
Needs: mlx

    python examples/mlx_average.py                                       # starts two ranks
    torchrun --standalone --nproc-per-node 2 examples/mlx_average.py
    mlx.launch -n 2 examples/mlx_average.py
"""

import os

import numpy as np

RANKS, ROWS, COLUMNS, STEPS, RATE = 2, 64, 8, 20, 0.1


def data():
    random = np.random.default_rng(0)
    inputs = random.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    return inputs, inputs @ np.arange(COLUMNS, dtype=np.float32)


def fit():
    import unisono.mlx  # noqa: F401 # isort: skip # before MLX

    import mlx.core as mx

    group = mx.distributed.init(strict=True)
    inputs, targets = (mx.array(np.split(each, group.size())[group.rank()]) for each in data())

    def loss(weights):
        return ((inputs @ weights - targets) ** 2).mean()

    weights = mx.zeros(COLUMNS)
    for _ in range(STEPS):
        gradient = mx.distributed.all_sum(mx.grad(loss)(weights)) / group.size()
        weights = weights - RATE * gradient
        mx.eval(weights)
    of_all = mx.distributed.all_gather(loss(weights)[None])
    return group.rank(), np.array(weights), np.array(of_all)


def fit_alone():
    inputs, targets = data()
    weights = np.zeros(COLUMNS, np.float32)
    for _ in range(STEPS):
        weights -= RATE * 2 / ROWS * inputs.T @ (inputs @ weights - targets)
    return weights, ((inputs @ weights - targets) ** 2).mean()


def check(weights, losses):
    expected, loss = fit_alone()
    np.testing.assert_allclose(weights, expected, rtol=1e-4)
    np.testing.assert_allclose(losses.mean(), loss, rtol=1e-3)
    print(f"weights {np.round(weights, 2)}, loss {loss:.4f}: those of one process")


if __name__ == "__main__":
    if any(name in os.environ for name in ("RANK", "MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        rank, *found = fit()
        if rank == 0:
            check(*found)
    else:
        import unisono

        _, *found = unisono.run(fit, ranks=RANKS)[0]
        check(*found)
