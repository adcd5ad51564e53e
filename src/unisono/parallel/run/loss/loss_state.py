"""The modules that a loss calls, and their buffers: a checkpoint has those that calls write."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from unisono.parallel.checkpoint import TensorBlock
from unisono.parallel.run.step.written_buffers import buffer_state, is_written

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


_PREFIX = "(loss)."
"""Begins the names of the buffers in a checkpoint; no parameter of a model has such a name."""


class LossState:
    """The persistent buffers of a loss.

    A buffer that no call has written, such as the weights of classes, is not saved: a program may
    go on with other weights.
    """

    def __init__(self, loss: object, stages: Sequence[nn.Module]) -> None:
        """`stages`: those of the model, whose buffers a loss may use."""
        self.modules = loss_modules(loss)
        """The modules that the loss calls, with names."""
        self._others = [each for stage in stages for each in stage.buffers()]
        self._first = {block.name: buffer_state(block.values) for block in self._blocks()}

    def written(self) -> list[TensorBlock]:
        """Returns the buffers that calls of the loss, or a checkpoint, have written."""
        return [
            each
            for each in self._blocks()
            if each.name not in self._first or is_written(each.values, self._first[each.name])
        ]

    def saved(self, names: Collection[str]) -> list[TensorBlock]:
        """Returns the buffers that a checkpoint with these names has."""
        return [each for each in self._blocks() if each.name in names]

    def _blocks(self) -> list[TensorBlock]:
        others = {id(each) for each in self._others}
        found = [block for name, module in self.modules for block in _blocks_of(name, module)]
        return [each for each in found if id(each.values) not in others]


def _blocks_of(start: str, module: nn.Module) -> list[TensorBlock]:
    persistent = module.state_dict(keep_vars=True)
    return [
        TensorBlock(
            name=_PREFIX + (f"{start}.{name}" if start else name),
            shape=tuple(each.shape),
            start=(0,) * each.dim(),
            values=each,
        )
        for name, each in module.named_buffers()
        if name in persistent
    ]
