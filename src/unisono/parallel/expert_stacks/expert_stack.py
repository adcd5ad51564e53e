"""A module whose parameters are stacks of experts, and its calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unisono.parallel.expert_stacks.call_forms import CallForm, Choices, ChosenForm

_OTHER_COUNTS = ("per_", "top", "shared")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStack:
    """A module that computes each row by the experts that are chosen for it."""

    name: str
    module: nn.Module = field(repr=False)
    experts: int
    parameters: tuple[str, ...]
    """The parameters whose first dimension counts the experts."""
    counts: tuple[str, ...] = ()
    """The attributes of the module whose value is the number of experts."""
    forms: tuple[CallForm, ...] = ()
    """The forms of calls for which the result is the weighted sum over the experts of a row."""

    @property
    def keeps_rows(self) -> bool:
        """True if the module is called with a row for each token, and returns one."""
        return all(isinstance(each, ChosenForm) for each in self.forms)

    def read(self, given: Sequence[Any], options: Mapping[str, Any]) -> tuple[CallForm, Choices]:
        """Returns the form and the choices of a call. Raises `ValueError` for other calls."""
        values = [*given]
        if options:
            signature = inspect.signature(type(self.module).forward)
            _, *values = signature.bind(self.module, *given, **options).arguments.values()
        for form in self.forms:
            found = form.read(values, self.experts)
            if found is not None:
                return form, found
        raise ValueError(
            f"{self.name}: was called with {', '.join(map(_text, values))}, of which ep cannot "
            "tell the experts of each row; expected rows (tokens, width) with the numbers and the "
            "weights of their experts, (tokens, k) each; ep = 1 works"
        )

    def forward(self, module: nn.Module, *values: Any, experts: int) -> torch.Tensor:
        """Returns the result of the module, or of its copy, that has this number of experts."""
        with _replaced(module, dict.fromkeys(self.counts, experts)):
            found: torch.Tensor = type(module).forward(module, *values)
        return found


def attributes_that_count(module: nn.Module, experts: int) -> Iterator[tuple[str, ...]]:
    """Yields the attributes that may count the experts: those with such a name, then all with this
    value."""
    same = [name for name, value in vars(module).items() if type(value) is int and value == experts]
    named = [
        each for each in same
        if "expert" in each and not any(word in each for word in _OTHER_COUNTS)
    ]  # fmt: skip
    yield tuple(named)
    if named != same:
        yield tuple(same)


@contextmanager
def _replaced(module: nn.Module, values: Mapping[str, int]) -> Iterator[None]:
    """Gives attributes of a module other values while it computes."""
    before = {name: vars(module)[name] for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _text(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
