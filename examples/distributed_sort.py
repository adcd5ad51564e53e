"""Sorts numbers that are spread over the ranks, then searches for one of them.

Covers: `gather`, `broadcast`, `all_to_all_v`, `all_reduce`. Scenario: sample sort. Each rank sends
a few samples to rank 0, which chooses the limits between ranks. Each number travels to the rank of
its interval, so that after a local sort all ranks together hold the sorted sequence.

    python examples/distributed_sort.py
"""

import numpy as np

import unisono

NUMBERS = 100_000


def limits_between_ranks(comm, numbers):
    """Returns the n - 1 limits between the intervals of the ranks, equal on all ranks."""
    samples = comm.gather(np.random.default_rng(comm.rank).choice(numbers, 1000), root=0)
    limits = np.empty(comm.size - 1)
    if comm.rank == 0:
        limits[:] = np.quantile(samples, np.arange(1, comm.size) / comm.size)
    return comm.broadcast(limits, root=0)


def sort(comm, numbers):
    """Returns this rank's interval of the sorted numbers of all ranks."""
    numbers = np.sort(numbers)
    cuts = np.searchsorted(numbers, limits_between_ranks(comm, numbers))
    counts = np.diff([0, *cuts, len(numbers)])  # the numbers for each rank
    return np.sort(comm.all_to_all_v(numbers, counts.tolist()))


def position(comm, interval, number):
    """Returns how many numbers of all ranks are smaller than `number`."""
    return comm.all_reduce(np.array([np.searchsorted(interval, number)]))[0]


def program():
    with unisono.init() as comm:
        numbers = np.random.default_rng(comm.rank).random(NUMBERS)
        interval = sort(comm, numbers)
        return numbers, interval, position(comm, interval, 0.5)


if __name__ == "__main__":
    results = unisono.run(program, ranks=4)
    expected = np.sort(np.concatenate([numbers for numbers, _, _ in results]))
    assert np.array_equal(np.concatenate([interval for _, interval, _ in results]), expected)
    assert results[0][2] == np.searchsorted(expected, 0.5)
    sizes = [len(interval) for _, interval, _ in results]
    print(f"sorted {sum(sizes)} numbers into intervals of {sizes}; {results[0][2]} are below 0.5")
