"""Compares two all-reduces that alternate in one run: Unisono's, over MPI as the transport, and
MPI's own.

    mpiexec -n 4 python benchmarks/mpi_transport.py --per-host 2

Each group of `--per-host` ranks acts as a host. Data between these hosts go through MPI. The
program prints the median over rounds of the slowest rank's time, and the range. MPI knows that all
ranks share memory, and copies directly between the callers' buffers, which a real fabric cannot do.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
SIZES = {8: 200, 64 << 10: 40, 1 << 20: 10, 16 << 20: 2}  # bytes: calls per round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    os.environ["UNISONO_WIRE"] = "mpi"
    os.environ["UNISONO_HOST_ID"] = str(WORLD.rank // options.per_host)
    import unisono

    with unisono.init() as comm:
        if comm.rank == 0:
            library = MPI.Get_library_version().split(",")[0].splitlines()[0]
            print(f"{comm.size} ranks, hosts {comm.hosts}, {library}")
        for nbytes, calls in SIZES.items():
            x, y = (np.ones(nbytes // 4, np.float32) for _ in range(2))
            times = time_alternating(
                lambda x=x: comm.all_reduce(x, "max"),
                lambda y=y: WORLD.Allreduce(MPI.IN_PLACE, y, MPI.MAX),
                calls=calls,
                rounds=options.rounds,
            )
            if comm.rank == 0:
                ours, theirs = map(text_of, times)
                ratio = np.median(times[0]) / np.median(times[1])
                print(f"{nbytes:>9} B: unisono {ours}, MPI {theirs} us, ratio {ratio:.2f}")


def time_alternating(
    *contestants: Callable[[], object], calls: int, rounds: int
) -> list[list[float]]:
    """Returns the seconds per call of each contestant in each round."""
    times: list[list[float]] = [[] for _ in contestants]
    for _ in range(rounds):
        for call, found in zip(contestants, times, strict=True):
            call()
            WORLD.Barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            found.append(WORLD.allreduce((time.perf_counter() - began) / calls, MPI.MAX))
    return times


def text_of(times: list[float]) -> str:
    return f"{np.median(times) * 1e6:.1f} [{min(times) * 1e6:.1f} to {max(times) * 1e6:.1f}]"


if __name__ == "__main__":
    main()
