"""The sizes of linear layers of torch and of GPT-2."""

from __future__ import annotations

from torch import nn

from unisono.torch_backend import own_parameters


def is_transposed(module: nn.Module) -> bool:
    """Returns True for a linear layer whose weight has the shape (inputs, outputs), such as the
    `Conv1D` of GPT-2."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Linear)


def outputs_of(module: nn.Module) -> int:
    """Returns the number of outputs of a linear layer."""
    return int(weight_of(module).shape[1 if is_transposed(module) else 0])


def inputs_of(module: nn.Module) -> int:
    """Returns the number of inputs of a linear layer."""
    return int(weight_of(module).shape[0 if is_transposed(module) else 1])


def weight_of(module: nn.Module) -> nn.Parameter:
    """Returns the weight of a linear layer or of an embedding."""
    weight: nn.Parameter = own_parameters(module)["weight"]
    return weight


def bias_of(module: nn.Module) -> nn.Parameter | None:
    """Returns the bias of a linear layer; None if it has none."""
    return own_parameters(module).get("bias")
