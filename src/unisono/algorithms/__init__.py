"""Collective algorithms: pure functions that return the schedule for a number of ranks.

Each family of algorithms has one file.

Start with `names`, `build` and `cost`. `parameters` describes the string that names an algorithm.
The package imports all its files, so a new file registers its algorithms without further changes.
"""

from importlib import import_module
from pkgutil import iter_modules

from unisono.algorithms.cost import Cost, measure, whole_chunks
from unisono.algorithms.describe import describe
from unisono.algorithms.host_layout import HostLayout, Hosts
from unisono.algorithms.registry import Algorithm, block_bytes, build, cost, find, names

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Algorithm",
    "Cost",
    "HostLayout",
    "Hosts",
    "block_bytes",
    "build",
    "cost",
    "describe",
    "find",
    "measure",
    "names",
    "whole_chunks",
]
