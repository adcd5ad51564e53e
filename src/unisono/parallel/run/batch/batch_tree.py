"""A batch or an output of a program: tensors in mappings, dataclasses, tuples and lists."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True, slots=True)
class BatchTree:
    """The tensors of a batch, under their names, and the nested values around them.

    Every tensor has the samples in its first dimension.
    """

    value: Any
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    text: str
    """Names of the tensors, and the plain values that are no tensors."""

    @classmethod
    def of(cls, value: Any) -> BatchTree:
        """Returns a batch of any nesting.

        Raises `ValueError`, with the name of the value, for tensors without samples or with another
        number of samples than the first tensor, and for objects whose tensors cannot be divided.
        """
        names, tensors, plain = [], [], []

        def note(name: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                names.append(name)
                tensors.append(leaf)
            else:
                _check_undivided(name, leaf)
                if isinstance(leaf, _PLAIN):
                    plain.append((name, leaf))
            return leaf

        replace_leaves(value, note)
        _check_samples(names, tensors, value)
        return cls(value, tuple(names), tuple(tensors), f"{names} {plain}")

    @classmethod
    def of_pair(cls, inputs: Any, targets: Any) -> BatchTree:
        """Returns a batch of inputs and targets.

        Raises `ValueError` for other values than tensors, and for different numbers of samples.
        """
        names = ("inputs", "targets")
        for name, each in zip(names, (inputs, targets), strict=True):
            if not isinstance(each, torch.Tensor) or each.dim() == 0:
                found = "a number" if isinstance(each, torch.Tensor) else type(each).__name__
                raise ValueError(f"{name}: expected a tensor (samples, ...), got {found}")
        if len(inputs) != len(targets):
            raise ValueError(
                f"expected as many targets as inputs, got {len(targets)} for {len(inputs)} inputs"
            )
        return cls((inputs, targets), names, (inputs, targets), "")

    @property
    def samples(self) -> int:
        """Number of samples of the batch."""
        return len(self.tensors[0])

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns the nested values with other tensors, in the order of `tensors`."""
        rest = iter(tensors)
        return replace_leaves(
            self.value, lambda _, leaf: next(rest) if isinstance(leaf, torch.Tensor) else leaf
        )


class _Place:
    """The place of a tensor in a list. No dataclass, whose fields would be replaced."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, slots=True)
class Frame:
    """The nested values around tensors, as a message without tensors has them."""

    value: Any

    @classmethod
    def of(
        cls, value: Any, other: Callable[[Any], Any] = lambda leaf: leaf
    ) -> tuple[Frame, list[torch.Tensor]]:
        """Returns what is around the tensors of nested values, and the tensors.

        `other`: returns what takes the place of a leaf that is no tensor.
        """
        tensors: list[torch.Tensor] = []

        def taken(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return other(leaf)
            tensors.append(leaf)
            return _Place(len(tensors) - 1)

        return cls(replace_leaves(value, taken)), tensors

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns the nested values with these tensors."""
        return replace_leaves(
            self.value,
            lambda _, leaf: tensors[leaf.number] if isinstance(leaf, _Place) else leaf,
        )


def replace_leaves(value: Any, replace: Callable[[str, Any], Any], name: str = "") -> Any:
    """Returns a copy of nested mappings, dataclasses, tuples and lists with other leaves.

    `replace`: gets the name and the value of each leaf, such as "images[0].pixels".
    """
    if isinstance(value, Mapping):
        items = {key: replace_leaves(each, replace, _key(name, key)) for key, each in value.items()}
        return _mapping_like(value, items)
    if isinstance(value, (tuple, list)):
        keys = _names_of(value)
        found = [
            replace_leaves(each, replace, _join(name, keys[place]) if keys else f"{name}[{place}]")
            for place, each in enumerate(value)
        ]
        return type(value)(*found) if keys else type(value)(found)
    if is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for key, each in fields_of(value).items():
            # also of frozen dataclasses, and fields that the constructor does not take
            object.__setattr__(changed, key, replace_leaves(each, replace, _join(name, key)))
        return changed
    return replace(name, value)


def copied(batch: Any) -> Any:
    """Returns a batch whose tensors are copies, because modules may change inputs in place, and
    microbatches share memory."""
    return replace_leaves(
        batch, lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
    )


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the values of a dataclass or of a named tuple by name; those of others are none."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {name: getattr(value, name) for name in _names_of(value)}


def _names_of(value: Any) -> tuple[str, ...]:
    """Returns the names of the values of a named tuple."""
    return getattr(type(value), "_fields", ()) if isinstance(value, tuple) else ()


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    found: Any = copy.copy(value)
    for key, each in items.items():
        found[key] = each
    return found


def _key(name: str, key: object) -> str:
    return _join(name, key) if isinstance(key, str) else f"{name}[{key!r}]"


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _check_samples(names: Sequence[str], tensors: Sequence[torch.Tensor], value: Any) -> None:
    """Raises `ValueError` for tensors that cannot be divided by samples together."""
    if not tensors:
        raise ValueError(
            f"batch: expected tensors (samples, ...) in a mapping, dataclass, tuple or list, got "
            f"{type(value).__name__} without a tensor"
        )
    for name, each in zip(names, tensors, strict=True):
        where = name or "batch"
        if each.layout is not torch.strided or each.is_nested:
            raise ValueError(
                f"{where}: expected a dense tensor (samples, ...), got one with the layout "
                f"{each.layout}, which is not divided into samples"
            )
        if each.dim() == 0:
            raise ValueError(
                f"{where}: expected a tensor (samples, ...), got one without dimensions; pass a "
                "Python number, which every part of the batch gets"
            )
        if len(each) != len(tensors[0]):
            raise ValueError(
                f"{where}: expected {len(tensors[0])} samples, as {names[0] or 'batch'} has, got "
                f"{len(each)}; the first dimension of every tensor of a batch is that of the "
                "samples"
            )


def _check_undivided(name: str, leaf: Any) -> None:
    """Raises `ValueError` for a leaf that has values of samples, but is passed on undivided."""
    if isinstance(leaf, np.ndarray) and leaf.ndim:
        raise ValueError(
            f"{name or 'batch'}: expected a tensor, got a NumPy array, which is not divided into "
            "samples; pass torch.from_numpy(array)"
        )
    if any(isinstance(each, torch.Tensor) for each in _inside(leaf)):
        raise ValueError(
            f"{name or 'batch'}: the tensors inside of {type(leaf).__name__} cannot be divided into"
            " samples; expected mappings, dataclasses, tuples and lists"
        )


def _inside(leaf: Any) -> Iterator[Any]:
    if isinstance(leaf, (*_PLAIN, type)) or callable(leaf):
        return
    if isinstance(leaf, (set, frozenset)):
        yield from leaf
    yield from getattr(leaf, "__dict__", {}).values()


def unused(output: Any) -> torch.Tensor:
    """Returns zero, whose gradients for all tensors of an output are zeros.

    So the backward pass runs, with its collectives, whatever the output's values. A product of the
    output with 0 would be NaN for infinite values, and a sum of float16 may be infinite.

    >>> x = torch.tensor([torch.inf], requires_grad=True)
    >>> unused({"logits": (x * 1, None)}).backward()
    >>> x.grad
    tensor([0.])
    """
    found = [each for each in tensors_in(output) if each.requires_grad]
    if not found:
        return torch.zeros((), requires_grad=True)
    zero: torch.Tensor = _Zero.apply(*found)  # type: ignore[no-untyped-call]
    return zero


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists, mappings, dataclasses, and attributes of other
    objects, each once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, _PLAIN) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        else:
            waiting += reversed(list(_values_in(each)))


def _values_in(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    if isinstance(value, (type, nn.Module)) or callable(value):
        return ()
    return getattr(value, "__dict__", {}).values()


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(each.shape, each.dtype) for each in tensors]
        return torch.zeros((), dtype=torch.promote_types(tensors[0].dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)
