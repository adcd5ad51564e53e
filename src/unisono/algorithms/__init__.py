"""Algorithms: pure functions from sizes to schedules, one file per family.

Begin with `names`, `build` and `cost`; `parameters` says how an algorithm is written as a text.
Importing this package imports every file in it, so an algorithm is registered by being there.
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
