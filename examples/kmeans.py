"""Finds clusters with k-means, where each rank holds a part of the points.

Covers: `broadcast`, `all_reduce` of several sums in one array. Scenario: 4 ranks with 5000 points
each around 5 centres. Each rank adds its points to their nearest centre. One all_reduce of sums and
counts gives all ranks the same new centres, equal to those of one process with all points.

    python examples/kmeans.py
"""

import numpy as np

import unisono

CENTRES, DIMENSIONS, POINTS, STEPS = 5, 2, 5000, 20


def points_of(rank):
    """Returns the points of a rank, around centres that all ranks share."""
    around = np.random.default_rng(7).uniform(-10, 10, (CENTRES, DIMENSIONS))
    rng = np.random.default_rng(100 + rank)
    return around[rng.integers(CENTRES, size=POINTS)] + rng.standard_normal((POINTS, DIMENSIONS))


def move(centres, points, total):
    """Returns the means of the points nearest to each centre. `total` adds over all ranks."""
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(axis=1)
    sums = np.zeros((CENTRES, DIMENSIONS + 1))  # the last column counts the points
    np.add.at(sums, nearest, np.c_[points, np.ones(len(points))])
    sums = total(sums)
    return np.where(sums[:, -1:] > 0, sums[:, :-1] / np.maximum(sums[:, -1:], 1), centres)


def program():
    with unisono.init() as comm:
        points = points_of(comm.rank)
        centres = comm.broadcast(points[:CENTRES].copy(), root=0)
        for _ in range(STEPS):
            centres = move(centres, points, comm.all_reduce)
        return centres


if __name__ == "__main__":
    results = unisono.run(program, ranks=4)
    everything = np.concatenate([points_of(rank) for rank in range(4)])
    alone = everything[:CENTRES]
    for _ in range(STEPS):
        alone = move(alone, everything, lambda sums: sums)
    assert all(np.array_equal(centres, results[0]) for centres in results)
    assert np.allclose(results[0], alone)
    print(f"4 ranks found the centres of one process:\n{results[0].round(2)}")
