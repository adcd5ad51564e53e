"""Measures the simulator's time and memory: `python benchmarks/simulator.py`, two minutes.

Each case runs in its own process.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from unisono import algorithms, simulate, topology
from unisono.bench.machine_facts import describe_machine
from unisono.topology import Topology

LEVELS = "level0:halving_doubling@16;level1:halving_doubling@64;level2:halving_doubling@64"
RESULTS = Path(__file__).parent / "results" / "simulator-speed.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An all_reduce of 1 GB, and the permitted seconds of its simulation."""

    algorithm: str
    net: Topology
    levels: tuple[int, ...] | None = None
    bar_s: float | None = None


CASES = {
    "ring, 1,024 ranks": Case(algorithm="ring", net=topology.ring(1024), bar_s=1),
    "hierarchical, 65,536 ranks, 3-level fat-tree": Case(
        algorithm=LEVELS, net=topology.fat_tree(64), bar_s=60
    ),
    "bucket, torus 32 x 32": Case(
        algorithm="bucket", net=topology.torus([32, 32]), levels=(32, 32), bar_s=30
    ),
    "halving-doubling, torus 32 x 32, congested": Case(
        algorithm="halving_doubling", net=topology.torus([32, 32]), bar_s=30
    ),
    "direct, fat-tree of 128 ranks, ECMP collisions": Case(
        algorithm="direct", net=topology.fat_tree(8)
    ),
}


def run(name: str) -> dict[str, object]:
    """Runs one case in this process."""
    case = CASES[name]
    begun = time.perf_counter()
    schedule = algorithms.build(
        "all_reduce", case.algorithm, ranks=case.net.num_ranks, levels=case.levels
    )
    built = time.perf_counter()
    result = simulate(schedule, case.net, 1e9)
    ended = time.perf_counter()
    return {
        "case": name,
        "transfers": len(schedule.transfers),
        "built_s": built - begun,
        "simulated_s": ended - built,
        "bar_s": case.bar_s,
        "peak_GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
        "all_reduce_s": result.time_s,
    }


def main() -> None:
    found = []
    for name in CASES:
        command = [sys.executable, __file__, name]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(text, end="", flush=True)
        found.append(json.loads(text))
    document = {"machine": describe_machine(), "cases": found}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(run(sys.argv[1])))
    else:
        main()
