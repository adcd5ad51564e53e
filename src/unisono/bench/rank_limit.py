"""The maximum number of ranks that a benchmark starts on this machine."""

from __future__ import annotations

import resource

from unisono.bench.machine_facts import usable_cores
from unisono.config import MOST_RANKS

_RANKS_PER_CORE = 64
"""Maximum number of ranks per core. More ranks would not start within the time limit of a minute,
because each rank starts Python with NumPy."""


def reason_against(ranks: int) -> str:
    """Returns the reason why `ranks` ranks are too many, with the limit, or an empty text if they
    are not too many."""
    cores = usable_cores()
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    bounds = [
        (MOST_RANKS, "the maximum of a host"),
        (cores * _RANKS_PER_CORE, f"{_RANKS_PER_CORE} for each of the {cores} usable cores"),
    ]
    if processes != resource.RLIM_INFINITY:
        bounds.append((processes, "the limit of processes (ulimit -u)"))
    most, because = min(bounds)
    return f"{ranks} ranks are too many: at most {most}, {because}" if ranks > most else ""
