"""Names whose modules a package imports on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.extras import with_cure


def lazy_names(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package (PEP 562). `names` lists the lazy names of each
    module; those of `package` itself are its submodules.

    The package also imports the names under `TYPE_CHECKING`, for type checkers.

    >>> get = lazy_names("unisono.errors", {"unisono.types": ["Op"]})
    >>> get("Op").ALL_REDUCE.value
    'all_reduce'
    """
    module_of = {name: module for module, found in names.items() for name in found}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        try:
            if module == package:
                value: Any = importlib.import_module(f"{package}.{name}")
            else:
                value = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise with_cure(error, f"{package}.{name}") from None
        setattr(sys.modules[package], name, value)
        return value

    return get
