"""The forms of a call of stacked experts: which rows are for which experts.

Models of transformers pass the experts that each row has chosen (`ChosenForm`). Others pass rows
that are sorted by expert, with the number of rows of each (`SortedForm`), or equally many rows for
each expert (`EqualForm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

Forward = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The rows of a call, and the experts of each. The result is, for each row, the weighted sum of
    the results of its experts."""

    rows: torch.Tensor
    """(rows, width)."""
    numbers: torch.Tensor
    """Numbers of experts, (rows, k)."""
    weights: torch.Tensor | None = None
    """(rows, k); None for weights of 1."""
    shape: tuple[int, ...]
    """The dimensions before the width, in which the module expects its result."""


class CallForm(Protocol):
    """A form of the calls of a module with stacked experts."""

    def sample(self, rows: torch.Tensor, numbers: torch.Tensor, experts: int) -> tuple[Any, ...]:
        """Returns arguments of a call with these rows, as far as the form can have them.

        `numbers`: the experts of each row, (rows, 2).
        """

    def read(self, values: Sequence[Any], experts: int) -> Choices | None:
        """Returns the choices of a call; None if its arguments have another form."""

    def compute(
        self, forward: Forward, rows: torch.Tensor, counts: Sequence[int], like: Choices
    ) -> torch.Tensor:
        """Returns the results of rows that are sorted by expert, `counts[i]` of them for expert i.

        `like`: the choices of a call, for their types.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenForm:
    """(rows, numbers, weights): each row has chosen some experts, as in models of transformers."""

    is_last: bool = False
    """True for (rows, weights, numbers)."""
    is_nested: bool = False
    """True for (samples, positions, width) and (samples, positions, k)."""

    def sample(self, rows: torch.Tensor, numbers: torch.Tensor, experts: int) -> tuple[Any, ...]:
        weights = (rows[:, :2].abs() + 0.5).to(rows.dtype)
        if self.is_nested:
            rows, numbers, weights = (_nested(each, 2) for each in (rows, numbers, weights))
        return (rows, weights, numbers) if self.is_last else (rows, numbers, weights)

    def read(self, values: Sequence[Any], experts: int) -> Choices | None:
        if len(values) != 3 or not all(isinstance(each, torch.Tensor) for each in values):
            return None
        rows, numbers, weights = values
        if self.is_last:
            numbers, weights = weights, numbers
        fits = numbers.shape == weights.shape and numbers.shape[:-1] == rows.shape[:-1]
        if not fits or rows.dim() != 2 + self.is_nested or not _are_integers(numbers):
            return None
        return Choices(
            rows=rows.flatten(0, -2),
            numbers=numbers.flatten(0, -2),
            weights=weights.flatten(0, -2),
            shape=tuple(rows.shape[:-1]),
        )

    def compute(
        self, forward: Forward, rows: torch.Tensor, counts: Sequence[int], like: Choices
    ) -> torch.Tensor:
        assert like.weights is not None
        numbers = torch.arange(len(counts), dtype=like.numbers.dtype)
        chosen = numbers.repeat_interleave(torch.tensor(counts)).unsqueeze(1)
        ones = torch.ones_like(chosen, dtype=like.weights.dtype)
        return forward(rows, ones, chosen) if self.is_last else forward(rows, chosen, ones)


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedForm:
    """(rows, counts): the rows are sorted by expert, and each expert has a number of them."""

    is_list: bool = True
    """True if the counts are a list, False for a tensor."""

    def sample(self, rows: torch.Tensor, numbers: torch.Tensor, experts: int) -> tuple[Any, ...]:
        flat = numbers.flatten()
        counts, order = flat.bincount(minlength=experts), flat.argsort(stable=True)
        return rows[order // numbers.shape[1]], counts.tolist() if self.is_list else counts

    def read(self, values: Sequence[Any], experts: int) -> Choices | None:
        if len(values) != 2 or not isinstance(values[0], torch.Tensor) or values[0].dim() != 2:
            return None
        rows, given = values
        if isinstance(given, torch.Tensor) == self.is_list or len(given) != experts:
            return None
        counts = torch.as_tensor(given)
        if (
            counts.shape != (experts,)
            or not _are_integers(counts)
            or int(counts.sum()) != len(rows)
        ):
            return None
        numbers = torch.arange(experts).repeat_interleave(counts)
        return Choices(rows=rows, numbers=numbers.unsqueeze(1), shape=(len(rows),))

    def compute(
        self, forward: Forward, rows: torch.Tensor, counts: Sequence[int], like: Choices
    ) -> torch.Tensor:
        return forward(rows, [*counts] if self.is_list else torch.tensor(counts))


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualForm:
    """(rows): each expert has an equal number of consecutive rows."""

    is_nested: bool = False
    """True for (experts, rows, width)."""

    def sample(self, rows: torch.Tensor, numbers: torch.Tensor, experts: int) -> tuple[Any, ...]:
        every = torch.cat([rows + number for number in range(experts)])
        return (_nested(every, experts) if self.is_nested else every,)

    def read(self, values: Sequence[Any], experts: int) -> Choices | None:
        if len(values) != 1 or not isinstance(values[0], torch.Tensor):
            return None
        (rows,) = values
        if rows.dim() != 2 + self.is_nested or len(rows) % experts:
            return None
        if self.is_nested and len(rows) != experts:
            return None
        flat = rows.flatten(0, -2)
        numbers = torch.arange(experts).repeat_interleave(len(flat) // experts)
        return Choices(rows=flat, numbers=numbers.unsqueeze(1), shape=tuple(rows.shape[:-1]))

    def compute(
        self, forward: Forward, rows: torch.Tensor, counts: Sequence[int], like: Choices
    ) -> torch.Tensor:
        longest = max(counts)
        parts = torch.split(rows, [*counts])
        padded = torch.cat([functional.pad(each, (0, 0, 0, longest - len(each))) for each in parts])
        found = forward(_nested(padded, len(counts)) if self.is_nested else padded)
        groups = found.reshape(len(counts), longest, found.shape[-1])
        return torch.cat([part[:count] for part, count in zip(groups, counts, strict=True)])


FORMS: tuple[CallForm, ...] = (
    ChosenForm(),
    ChosenForm(is_last=True),
    ChosenForm(is_nested=True),
    ChosenForm(is_last=True, is_nested=True),
    SortedForm(),
    SortedForm(is_list=False),
    EqualForm(),
    EqualForm(is_nested=True),
)
"""All forms that are known."""


def _nested(rows: torch.Tensor, groups: int) -> torch.Tensor:
    return rows.view(groups, -1, rows.shape[-1])


def _are_integers(numbers: torch.Tensor) -> bool:
    return not (numbers.is_floating_point() or numbers.dtype == torch.bool)
