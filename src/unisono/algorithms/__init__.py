"""Algorithms: pure functions from sizes to schedules, one file per family.

`names`, `build` and `cost` are the entries; `spec` says how an algorithm is written. Importing this
package imports every file in it, so that an algorithm is registered by being there.
"""

from importlib import import_module
from pkgutil import iter_modules

from unisono.algorithms.cost import Cost, measure
from unisono.algorithms.registry import Algorithm, block_bytes, build, cost, find, names

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Algorithm", "Cost", "block_bytes", "build", "cost", "find", "measure", "names"]
