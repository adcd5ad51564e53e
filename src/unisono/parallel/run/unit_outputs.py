"""Outputs of modules in which `fully_shard` does not find the tensors.

`fully_shard` gathers weights for the backward pass when a gradient reaches a tensor of a module's
output. It finds those in tuples, lists, dicts and registered types, but not in dataclasses and
other mappings, as which models return a loss and logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.parallel.run.batch_tree import replace_leaves
from unisono.parallel.run.unused_output import tensors_in
from unisono.torch_backend import flatten

_PLAIN = (torch.Tensor, type(None), bool, int, float, complex, str, bytes)


class _Place:
    """The place of a tensor of an output in the list of its tensors."""

    def __init__(self, number: int) -> None:
        self.number = number


class UnitOutputs:
    """Gives `fully_shard` a list of the tensors in place of a module's output.

    `take_apart` is a forward hook to be registered before `fully_shard`, `put_together` one to be
    registered after it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._outputs: list[Any] = []
        """For each forward pass in progress, the output without tensors; None if it is whole."""

    def take_apart(self, _: nn.Module, __: object, results: Any) -> Any:
        """Raises `ValueError` for an object without a tensor that can be found."""
        if all(isinstance(each, _PLAIN) for each in flatten(results)[0]):
            self._outputs.append(None)
            return None
        found: list[torch.Tensor] = []

        def taken(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            found.append(leaf)
            return _Place(len(found) - 1)

        output = replace_leaves(results, taken)
        if not found and any(each.requires_grad for each in tensors_in(results)):
            raise ValueError(
                f"zero gathers weights when a gradient reaches the result of a module, but "
                f"{self._name} returns {type(results).__name__}; return tensors in "
                "mappings, dataclasses, tuples or lists; zero = 1 works"
            )
        self._outputs.append(output)
        return found

    def put_together(self, _: nn.Module, __: object, results: Any) -> Any:
        """Returns the output of the module."""
        output = self._outputs.pop()
        if output is None:
            return None
        return replace_leaves(
            output, lambda _, leaf: results[leaf.number] if isinstance(leaf, _Place) else leaf
        )
