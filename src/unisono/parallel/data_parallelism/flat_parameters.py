"""Parameters and gradients as views of flat arrays, so that one collective moves them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class FlatParameters:
    """A flat array of gradients and a flat array of weights, padded to a multiple of `parts`."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, parts: int, holds_weights: bool = True
    ) -> None:
        """The parameters must be distinct and have one element type and device.

        With `holds_weights=False` the weights stay in their own arrays.
        """
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
        self.weights = torch.zeros_like(self.gradient) if holds_weights else first.new_empty(0)
        """The flat array of weights; empty with `holds_weights=False`."""
        if holds_weights:
            self.weights[:total] = nn.utils.parameters_to_vector(parameters).detach()
            # the parameters become views of `weights`
            nn.utils.vector_to_parameters(self.weights, parameters)
        places = zip(parameters, torch.split(self.gradient[:total], self.sizes), strict=True)
        self._views = [place.view_as(parameter) for parameter, place in places]
        self.collect()

    def first(self, part: int) -> int:
        """Returns the index, in the flat array, of the first element of part number `part`."""
        return part * self.part_length

    def part(self, part: int) -> nn.Parameter:
        """Returns part number `part` of the flat weights as one parameter, a view."""
        first = self.first(part)
        return nn.Parameter(self.weights[first : first + self.part_length])

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
