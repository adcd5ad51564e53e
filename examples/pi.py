"""Computes pi by numerical integration, like the first program of many MPI courses.

Covers: `unisono.init` under any launcher, `broadcast`, `all_reduce`, without torch.
Scenario: n ranks integrate 4 / (1 + x^2) from 0 to 1. Each rank sums every n-th of the slices.

    mpiexec -n 4 python examples/pi.py
    srun -n 4 python examples/pi.py
    torchrun --standalone --nproc-per-node 4 examples/pi.py
"""

import math
import sys

import numpy as np

import unisono


def main():
    with unisono.init() as comm:
        slices = np.zeros(1, np.int64)
        if comm.rank == 0:
            slices[0] = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
        comm.broadcast(slices)
        width = 1 / slices[0]
        x = (np.arange(comm.rank, slices[0], comm.size) + 0.5) * width
        area = np.array([np.sum(4 / (1 + x * x)) * width])
        comm.all_reduce(area)
        if comm.rank == 0:
            print(f"pi is {area[0]:.12f}, error {abs(area[0] - math.pi):.0e}, {comm.size} ranks")


if __name__ == "__main__":
    main()
