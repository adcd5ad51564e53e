"""How many ranks a benchmark starts on this machine at most."""

from __future__ import annotations

import resource

from unisono.bench.machine_facts import usable_cores
from unisono.config import MOST_RANKS

_A_CORE = 64
"""More would not be there within the minute that a world has to start: that is a new interpreter
each, with NumPy."""


def reason_against(ranks: int) -> str:
    """Why so many ranks are not started, with the number that would be; empty if they are."""
    cores = usable_cores()
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    bounds = [
        (MOST_RANKS, "ranks of a host"),
        (cores * _A_CORE, f"{_A_CORE} for each of the {cores} cores that are usable here"),
    ]
    if processes != resource.RLIM_INFINITY:
        bounds.append((processes, "the limit of processes here (ulimit -u)"))
    most, because = min(bounds)
    return f"{ranks} ranks are too many: at most {most}, {because}" if ranks > most else ""
