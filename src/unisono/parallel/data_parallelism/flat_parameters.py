"""Parameters and gradients as views of flat arrays, so that one collective moves them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class FlatSpan:
    """A range of the flat array of weights, as one parameter for an optimizer."""

    first: int
    """Index of the range's first element in the flat array."""
    weights: nn.Parameter


class FlatParameters:
    """A flat array of gradients and a flat array of weights, padded to a multiple of `parts`."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, parts: int) -> None:
        """The parameters must be distinct and have one element type and device."""
        self._parameters = parameters
        self.sizes = [each.numel() for each in parameters]
        """Number of elements of each parameter, in the order of the flat array."""
        total = sum(self.sizes)
        self.part_length = -(-total // parts)
        first = parameters[0]
        self.gradient = torch.zeros(
            self.part_length * parts, dtype=first.dtype, device=first.device
        )
        """The flat array of gradients."""
        self.weights = torch.zeros_like(self.gradient)
        """The flat array of weights."""
        torch.cat([each.detach().reshape(-1) for each in parameters], out=self.weights[:total])
        # the parameters become views of `weights`
        nn.utils.vector_to_parameters(self.weights, parameters)
        places = zip(parameters, torch.split(self.gradient[:total], self.sizes), strict=True)
        self._views = [place.view_as(parameter) for parameter, place in places]
        self.collect()

    def part(self, part: int) -> FlatSpan:
        """Returns part number `part` of the flat weights, as a view."""
        return self._span(part * self.part_length, self.part_length)

    def spans(self, groups: Sequence[object], *, longest: int) -> dict[nn.Parameter, FlatSpan]:
        """Returns, for each parameter, the span of the flat array that holds it, as a view.

        A span holds consecutive parameters with equal `groups`. A span with several parameters has
        at most `longest` elements. The gradients of the spans are views of `gradient`.
        """
        runs: list[list[int]] = []
        for i, size in enumerate(self.sizes):
            last = runs[-1] if runs else []
            count = sum(self.sizes[j] for j in last)
            if last and groups[last[0]] == groups[i] and count + size <= longest:
                last.append(i)
            else:
                runs.append([i])
        found: dict[nn.Parameter, FlatSpan] = {}
        first = 0
        for run in runs:
            count = sum(self.sizes[i] for i in run)
            span = self._span(first, count)
            span.weights.grad = self.gradient[first : first + count]
            found |= {self._parameters[i]: span for i in run}
            first += count
        return found

    def _span(self, first: int, count: int) -> FlatSpan:
        return FlatSpan(first, nn.Parameter(self.weights[first : first + count]))

    def zero_gradients(self) -> None:
        """Sets all gradients to zero, in the flat array."""
        self.gradient.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def collect(self) -> None:
        """Copies gradients that are elsewhere to the flat array. A gradient of None becomes zeros.

        A gradient is elsewhere if the program assigned another tensor to the parameter's `grad`.
        """
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view
