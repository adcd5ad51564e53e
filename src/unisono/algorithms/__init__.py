"""Algorithms: pure functions from sizes to schedules, one file per family.

Importing this package registers all of them; `build` and `names` are the entries.
"""

from unisono.algorithms import (
    binomial_tree,
    direct,
    one_shot,
    pairwise,
    recursive_doubling,
    ring,
    scan,
    scatter_gather,
)
from unisono.algorithms.registry import build, names

__all__ = [
    "binomial_tree",
    "build",
    "direct",
    "names",
    "one_shot",
    "pairwise",
    "recursive_doubling",
    "ring",
    "scan",
    "scatter_gather",
]
