"""The part of the host's cores that a rank uses."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from unisono import config


def share(rank: int, ranks: int, *, bind: bool) -> None:
    """Limits torch to as many threads as this rank has cores. With `bind`, also keeps all threads
    of this process on these cores.
    """
    threads = config.export_threads(ranks, len(os.sched_getaffinity(0)))
    if bind:
        bind_threads(rank, ranks)
    torch = sys.modules.get("torch")  # the program's file may have imported it
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)


def part_of(cores: Sequence[int], rank: int, ranks: int) -> set[int]:
    """Returns the cores of a rank: neighbours, and as many for each rank. With more ranks than
    cores, several ranks have the same core.

    >>> [part_of([0, 1, 4, 5], rank, ranks=2) for rank in range(2)]
    [{0, 1}, {4, 5}]
    """
    each = len(cores) // ranks
    first = rank * each if each else rank % len(cores)
    return set(cores[first : first + max(each, 1)])


def bind_threads(rank: int, ranks: int) -> None:
    """Keeps all threads of this process, and those that they start, on the rank's part of the cores
    that the process may use.
    """
    cores = part_of(sorted(os.sched_getaffinity(0)), rank, ranks)
    for thread in Path("/proc/self/task").iterdir():  # imports may have started some
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
