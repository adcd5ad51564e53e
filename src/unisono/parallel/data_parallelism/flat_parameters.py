"""Parameters and gradients as views of flat arrays, so that one collective moves them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import distributed as dist
from torch import nn

from unisono.torch_backend import version_of, zeros_for


@dataclass(frozen=True, slots=True, eq=False)
class FlatSpan:
    """A range of the flat array of weights, as one parameter for an optimizer."""

    first: int
    """Index of the range's first element in the flat array."""
    weights: nn.Parameter

    @property
    def end(self) -> int:
        """Index of the element after the range."""
        return self.first + self.weights.numel()


class FlatParameters:
    """A flat array of gradients and a flat array of weights, padded to a multiple of `parts`."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        parts: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """The parameters must be distinct and have one element type and device. `group` has the
        collectives on the flat arrays, if any.
        """
        self._parameters = parameters
        self.sizes = [each.numel() for each in parameters]
        """Number of elements of each parameter, in the order of the flat array."""
        self._bounds = list(pairwise([0, *accumulate(self.sizes)]))
        total = sum(self.sizes)
        self.part_length = -(-total // parts)
        first = parameters[0]
        length = self.part_length * parts
        self.gradient = zeros_for(group, length, first.dtype, first.device)
        """The flat array of gradients."""
        self.weights = zeros_for(group, length, first.dtype, first.device)
        """The flat array of weights."""
        torch.cat([each.detach().reshape(-1) for each in parameters], out=self.weights[:total])
        # the parameters become views of `weights`
        nn.utils.vector_to_parameters(self.weights, parameters)
        places = zip(parameters, torch.split(self.gradient[:total], self.sizes), strict=True)
        # `data` gives each view a version of its own, which counts the changes of this view only
        self._views = [place.view_as(parameter).data for parameter, place in places]
        self._versions = [version_of(each) for each in self._views]
        self._addresses = [each.data_ptr() for each in parameters]
        self.used = [False] * len(parameters)
        """For each parameter: whether backward passes gave it a gradient between the most recent
        calls of `zero_gradients` and `collect`."""
        self.collect()

    def part(self, part: int) -> tuple[int, int]:
        """Returns the first and the last index, plus 1, of part number `part`."""
        return part * self.part_length, (part + 1) * self.part_length

    def spans(
        self, groups: Sequence[int | None], *, longest: int | None = None, begin: int = 0, end: int
    ) -> list[tuple[FlatSpan, int | None]]:
        """Returns the elements from `begin` to `end` as consecutive spans, each with its group.

        `groups` has the group of each parameter. A span holds consecutive parameters of one group,
        cut at `begin` and `end`. A span with several parameters has at most `longest` elements.
        """
        bounds: list[tuple[int, int, int | None]] = []
        for (first, last), group in zip(self._bounds, groups, strict=True):
            low, high = max(first, begin), min(last, end)
            if low >= high:
                continue
            start, _, last_group = bounds[-1] if bounds else (low, low, None)
            fits = longest is None or high - start <= longest
            if bounds and last_group == group and fits:
                bounds[-1] = start, high, group
            else:
                bounds.append((low, high, group))
        return [(self._span(low, high - low), group) for low, high, group in bounds]

    def ranges(self, chosen: Sequence[bool]) -> list[tuple[int, int]]:
        """Returns the elements of the chosen parameters as ranges (begin, end), in order. Adjacent
        parameters share a range.
        """
        found: list[tuple[int, int]] = []
        for (first, last), is_chosen in zip(self._bounds, chosen, strict=True):
            if is_chosen and last > first:
                is_adjacent = found and found[-1][1] == first
                begin = found.pop()[0] if is_adjacent else first
                found.append((begin, last))
        return found

    def cuts(self, kinds: Sequence[object]) -> list[int]:
        """Returns the elements at which the kind changes. `kinds` has that of each parameter."""
        pairs = zip(pairwise(kinds), self._bounds[1:], strict=True)
        return [first for (before, kind), (first, _) in pairs if kind != before]

    def _span(self, first: int, count: int) -> FlatSpan:
        return FlatSpan(first, nn.Parameter(self.weights[first : first + count]))

    def adopt(self, names: Sequence[str]) -> None:
        """Copies values that the program assigned to a parameter's `data` to the flat array.

        `names`: those of the parameters. Raises `ValueError` for values of another shape or type,
        and leaves the parameter its former values.
        """
        rows = zip(self._parameters, self._addresses, self.sizes, strict=True)
        moved = [
            number
            for number, (parameter, address, size) in enumerate(rows)
            if parameter.data_ptr() != address and size
        ]
        if moved:
            self._adopt(moved, names)

    @torch.no_grad()
    def _adopt(self, moved: Sequence[int], names: Sequence[str]) -> None:
        for number in moved:
            parameter, (first, last) = self._parameters[number], self._bounds[number]
            place = self.weights[first:last].view_as(self._views[number])
            found = parameter.data
            parameter.data = place
            if (found.shape, found.dtype) != (place.shape, place.dtype):
                raise ValueError(
                    f"{names[number]}: expected data of shape {tuple(place.shape)} and "
                    f"{place.dtype}, as parallelize received it, got {tuple(found.shape)} and "
                    f"{found.dtype}"
                )
            place.copy_(found)

    def zero_gradients(self) -> None:
        """Sets all gradients to zero, in the flat array."""
        self.gradient.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        self._versions = [version_of(each) for each in self._views]

    def collect(self) -> None:
        """Copies gradients that are elsewhere to the flat array. A gradient of None becomes zeros.

        A gradient is elsewhere if the program assigned another tensor to the parameter's `grad`.
        """
        pairs = zip(self._views, self._versions, strict=True)
        self.used = [version_of(view) != version for view, version in pairs]
        places = enumerate(zip(self._parameters, self._views, strict=True))
        self.collect_some([number for number, (each, view) in places if each.grad is not view])

    def collect_some(self, numbers: Iterable[int]) -> None:
        """Copies the gradients of some parameters to the flat array, as `collect` does."""
        for number in numbers:
            parameter, view = self._parameters[number], self._views[number]
            if parameter.grad is view:
                continue
            self.used[number] = parameter.grad is not None
            if parameter.grad is None:
                view.zero_()
                self._versions[number] = version_of(view)
            else:
                view.copy_(parameter.grad)
            parameter.grad = view

    def gradient_version(self, number: int) -> int:
        """Returns a number that each change of a parameter's gradient changes; -1 if the gradient
        is elsewhere."""
        view = self._views[number]
        return version_of(view) if self._parameters[number].grad is view else -1

    def in_range(self, begin: int, end: int) -> list[int]:
        """Returns the numbers of the parameters with elements from `begin` to `end`."""
        return [
            number
            for number, (low, high) in enumerate(self._bounds)
            if max(low, begin) < min(high, end)
        ]
