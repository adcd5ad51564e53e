"""Measures the planner's time for one prediction, its interval, one search and the import.

    python benchmarks/planner_speed.py

The program prints the shortest of several times, and the time of a fixed Python loop on the same
machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable

from unisono import planner

MODEL = planner.load_model("gpt3-175b")
CLUSTER = planner.Cluster.parse("a100:1024")
JOB = planner.Workload(seq=2048, global_batch=1536, micro_batch=1, recompute="full")
OPEN_JOB = planner.Workload(seq=8192, global_batch=1536)


def shortest_us(action: Callable[[], object], number: int = 100) -> float:
    """Returns the shortest mean time of 7 repetitions, in microseconds."""
    return min(timeit.repeat(action, number=number, repeat=7)) / number * 1e6


def new_run_us() -> float:
    """Returns the microseconds of a prediction for a workload that the planner has not predicted
    before.
    """
    layout = planner.Layout(dp=16, tp=8, pp=8, sequence_parallel=True, zero=1)
    times = []
    for batch in range(1600, 1600 + 16 * 200, 16):
        job = planner.Workload(seq=2048, global_batch=batch, micro_batch=1, recompute="full")
        begin = time.perf_counter()
        planner.predict(MODEL, CLUSTER, layout, job)
        times.append(time.perf_counter() - begin)
    return min(times) * 1e6


def import_s(*modules: str) -> float:
    """Returns the shortest time of 5 imports in new processes, in seconds. The first import writes
    the bytecode, as the installation of a package does.
    """
    program = f"import time; t = time.perf_counter(); import {', '.join(modules)}; "
    program += "print(time.perf_counter() - t)"
    command = [sys.executable, "-c", program]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PYTHONPYCACHEPREFIX": folder}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        return min(float(subprocess.check_output(command, text=True, env=env)) for _ in range(5))


def main() -> None:
    """Prints the measurements."""
    layout = planner.Layout(dp=16, tp=8, pp=8, sequence_parallel=True, zero=1)
    loop_us = shortest_us(lambda: sum(i * i for i in range(1000)))
    print(f"a loop of 1,000 squares: {loop_us:.0f} us")
    seen_us = shortest_us(lambda: planner.predict(MODEL, CLUSTER, layout, JOB))
    print(f"predict, workload seen before: {seen_us:.0f} us; new workload: {new_run_us():.0f} us")
    interval_us = shortest_us(lambda: planner.predict(MODEL, CLUSTER, layout, JOB).low_s, 10)
    print(f"predict with its interval: {interval_us:.0f} us")
    begin = time.perf_counter()
    found = planner.search(MODEL, CLUSTER, OPEN_JOB, schedules=("1f1b", "zb1p", "gpipe"))
    search_s = time.perf_counter() - begin
    rate = found.counts.considered / search_s
    print(f"search: {found.counts} in {search_s:.2f} s, {1e5 / rate:.1f} s for 100,000")
    beside_numpy = import_s("numpy", "unisono.planner, unisono.planner.prediction")
    print(f"import beside NumPy: {(beside_numpy - import_s('numpy')) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
