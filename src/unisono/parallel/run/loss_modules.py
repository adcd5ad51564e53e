"""The modules that a loss calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator

from torch import nn

_DEPTH = 3
"""A function may call functions that call modules."""


def loss_modules(loss: object) -> list[tuple[str, nn.Module]]:
    """Returns the modules of a loss, each after the name that the loss has for it.

    These are the loss itself, the owner of a method, and the modules in the variables of a function
    or in the attributes of an object. Modules inside these modules are not listed apart.

    >>> counts = nn.CrossEntropyLoss()
    >>> loss_modules(lambda output, targets: counts(output, targets))
    [('counts', CrossEntropyLoss())]
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in _found(loss, "", _DEPTH):
        found.setdefault(id(module), (name, module))
    return list(found.values())


def _found(value: object, name: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield name, value
    elif depth and callable(value) and not isinstance(value, type):
        for key, each in _parts(value):
            yield from _found(each, f"{name}.{key}" if name else key, depth - 1)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yields what a function or a callable object uses, with names."""
    if inspect.ismethod(value):
        yield "", value.__self__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"argument{number}", each) for number, each in enumerate(value.args))
        yield from value.keywords.items()
    elif inspect.isfunction(value):
        try:
            variables = inspect.getclosurevars(value)
        except ValueError:  # a variable has no value yet
            return
        yield from variables.nonlocals.items()
        yield from variables.globals.items()
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()
