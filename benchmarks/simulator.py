"""How long the simulator takes, and what memory: `python benchmarks/simulator.py`.

Each case runs in a process of its own; prints seconds of building and of simulating, and the peak.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from unisono import algorithms, simulate, topology
from unisono.topology import Topology

LEVELS = "level0:halving_doubling@16;level1:halving_doubling@64;level2:halving_doubling@64"
CASES: dict[str, tuple[str, Topology, tuple[int, ...] | None]] = {
    "ring, 1,024 ranks": ("ring", topology.ring(1024), None),
    "hierarchical, 65,536 ranks, 3-level fat-tree": (LEVELS, topology.fat_tree(64), None),
    "bucket, torus 32 x 32": ("bucket", topology.torus([32, 32]), (32, 32)),
    "halving-doubling, torus 32 x 32, congested": (
        "halving_doubling",
        topology.torus([32, 32]),
        None,
    ),
    "direct, fat-tree of 128 ranks, ECMP collisions": ("direct", topology.fat_tree(8), None),
}


def run(case: str) -> None:
    """One case, here."""
    name, net, levels = CASES[case]
    begun = time.perf_counter()
    schedule = algorithms.build("all_reduce", name, ranks=net.num_ranks, levels=levels)
    built = time.perf_counter()
    result = simulate(schedule, net, 1e9)
    ended = time.perf_counter()
    peak_GiB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(
        f"{case}: {len(schedule.transfers):,} transfers, built in {built - begun:.2f} s, "
        f"simulated in {ended - built:.2f} s, {peak_GiB:.2f} GiB "
        f"(the all_reduce itself: {result.time_s * 1e3:.4g} ms)",
        flush=True,
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1])
    else:
        for each in CASES:
            subprocess.run([sys.executable, __file__, each], check=True)
