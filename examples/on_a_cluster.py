"""Averages gradients in ranks that Dask, Ray or mpi4py start on the hosts of a cluster.

Covers: `unisono.run(executor=...)` with three executors, and the few lines that Ray needs.
Scenario: 4 ranks join one group, wherever the executor has placed them, and add their arrays.

    python examples/on_a_cluster.py            # threads of this program: no cluster
    python examples/on_a_cluster.py dask       # pip install distributed
    python examples/on_a_cluster.py ray        # pip install ray
    mpiexec -n 5 python -m mpi4py.futures examples/on_a_cluster.py mpi
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import unisono

RANKS = 4


def average() -> tuple[int, float, list[int]]:
    with unisono.init() as comm:
        gradients = np.full(1000, float(comm.rank))
        comm.all_reduce(gradients, "avg")
        return comm.rank, float(gradients[0]), [len(ranks) for ranks in comm.hosts]


class RayExecutor:
    """Runs calls as Ray tasks, with one CPU each."""

    def submit(self, fn, *args):
        import ray

        return ray.remote(num_cpus=1, max_retries=0)(fn).remote(*args).future()


def main(kind: str) -> None:
    if kind == "dask":
        from distributed import Client

        # Your cluster: Client("tcp://scheduler:8786").
        with Client(n_workers=RANKS, threads_per_worker=1) as client:
            print(unisono.run(average, RANKS, executor=client))
    elif kind == "ray":
        import ray

        ray.init(num_cpus=RANKS)  # your cluster: ray.init(address="auto")
        print(unisono.run(average, RANKS, executor=RayExecutor()))
    elif kind == "mpi":
        from mpi4py.futures import MPIPoolExecutor

        with MPIPoolExecutor(RANKS) as workers:
            print(unisono.run(average, RANKS, executor=workers))
    else:
        with ThreadPoolExecutor(RANKS) as threads:
            print(unisono.run(average, RANKS, executor=threads))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "threads")
