"""Refusal of parameters that no layout can divide, sum or send, and of trained losses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def check_parameters(model: nn.Module) -> None:
    """Raises `ValueError` for parameters and buffers without a shape or without a dense array."""
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(values):
            raise ValueError(
                f"{name}: expected a parameter with a shape, got that of a lazy module; call the "
                "model once on inputs of a batch before parallelize"
            )
        if values.layout != torch.strided:
            raise ValueError(
                f"{name}: expected a dense tensor, got the layout {values.layout}; "
                "values.to_dense() works"
            )


def check_loss_parameters(loss: object) -> None:
    """Raises `ValueError` for a loss with parameters of its own, which no rank would sum."""
    module = getattr(loss, "__self__", loss)  # of a bound method
    if not isinstance(module, nn.Module):
        return
    for name, each in module.named_parameters():
        if each.requires_grad:
            raise ValueError(
                f"loss: {type(module).__name__} has the trained parameter {name}, whose gradient "
                "would not be summed over the ranks; make it a parameter of the model, which "
                "returns what the loss needs, or freeze it (requires_grad_(False))"
            )
