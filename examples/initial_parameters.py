"""Gives all ranks the initial parameters of rank 0, by one broadcast for each array.

Covers: `broadcast`, `all_reduce` with "min" and "max". Scenario: four ranks draw different random
parameters, as programs without a common seed do. Rank 0's values win.

    python examples/initial_parameters.py
"""

import numpy as np

import unisono


def program():
    with unisono.init() as comm:
        rng = np.random.default_rng()  # a different state on each rank
        parameters = {"weight": rng.standard_normal((8, 4)), "bias": rng.standard_normal(4)}
        for array in parameters.values():
            comm.broadcast(array, root=0)
        for array in parameters.values():
            lowest = comm.all_reduce(array.copy(), op="min")
            highest = comm.all_reduce(array.copy(), op="max")
            assert np.array_equal(lowest, highest)  # equal on all ranks
        return float(sum(np.abs(array).sum() for array in parameters.values()))


if __name__ == "__main__":
    sums = unisono.run(program, ranks=4)
    assert len(set(sums)) == 1
    print(f"{len(sums)} ranks begin with equal parameters; their absolute sum is {sums[0]:.3f}")
