"""A model's parameters and gradients as arrays of bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from unisono.parallel.parameter_server.byte_ranges import ByteLayout, TensorSpec


class ModelBytes:
    """The parameters that require a gradient, in two arrays of bytes: gradients and values.

    A parameter that several modules share is one parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        """Raises `ValueError` if no parameter is trainable, or if one is not in CPU memory."""
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        if not named:
            raise ValueError("model: expected a parameter that requires a gradient, found none")
        for name, parameter in named:
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"model: expected parameters in CPU memory, found {name} on {parameter.device}"
                )
        self._parameters = [parameter for _, parameter in named]
        served = {id(parameter) for parameter in self._parameters}
        self.rest = [
            each for each in (*model.parameters(), *model.buffers()) if id(each) not in served
        ]
        """Tensors without a server: frozen parameters, and buffers such as running means."""
        self.layout = ByteLayout(
            [
                TensorSpec(
                    name=name,
                    count=each.numel(),
                    dtype=str(each.dtype).removeprefix("torch."),
                    item_bytes=each.element_size(),
                )
                for name, each in named
            ]
        )
        self.gradients = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        self.values = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        self._gradient_views = self._views(self.gradients)
        self._value_views = self._views(self.values)
        self._used = np.zeros(len(named), np.uint8)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        layout = self.layout
        return [
            flat[start : start + spec.nbytes].view(parameter.dtype).view(parameter.shape)
            for start, spec, parameter in zip(
                layout.starts, layout.tensors, self._parameters, strict=True
            )
        ]

    @torch.no_grad()
    def pack_gradients(self) -> NDArray[np.uint8]:
        """Copies all gradients to the array of gradients.

        Returns an array with a 1 for each parameter that has a gradient, and a 0 for each other.

        A missing gradient counts as zeros.
        """
        for index, (parameter, view) in enumerate(
            zip(self._parameters, self._gradient_views, strict=True)
        ):
            grad = parameter.grad
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)
            self._used[index] = grad is not None
        return self._used

    @torch.no_grad()
    def pack_values(self) -> None:
        """Copies all parameters to the array of values."""
        for parameter, view in zip(self._parameters, self._value_views, strict=True):
            view.copy_(parameter)

    @torch.no_grad()
    def unpack_values(self) -> None:
        """Copies the array of values to the parameters."""
        for parameter, view in zip(self._parameters, self._value_views, strict=True):
            parameter.copy_(view)

    def clear_gradients(self) -> None:
        """Sets all gradients to None."""
        for parameter in self._parameters:
            parameter.grad = None
