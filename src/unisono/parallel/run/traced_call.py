"""The forward pass of a model as a function of a batch's tensors, for a graph to be traced."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.parallel.run.batch_tree import BatchTree, replace_leaves
from unisono.parallel.run.model_call import ModelCall
from unisono.parallel.run.own_loss import LossWatch, TracedLoss, model_loss

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


class _Result:
    """The place of a tensor among the results of a graph."""

    def __init__(self, place: int) -> None:
        self.place = place


class TracedCall:
    """Calls a model with tensors, and returns the tensors of its output.

    With the model's own loss, these are the loss and its weight.
    """

    def __init__(
        self, model: nn.Module, call: ModelCall, example: BatchTree, *, needs_loss: bool
    ) -> None:
        """`example`: a microbatch as the model receives it. `needs_loss`: the output is needed for
        its own loss alone."""
        self._model, self._call, self.example = model, call, example
        self._needs_loss = needs_loss
        self._output: Any = None
        self._problem: ValueError | None = None
        self._is_sum = False

    def module(self) -> nn.Module:
        """Returns a module with the parameters of the model, under their names, that is called with
        the tensors of a batch."""
        found = copy.copy(self._model)
        found.forward = self._forward
        return found

    def _forward(self, *tensors: torch.Tensor) -> Any:
        value = self.example.with_tensors(tensors)
        if not self._needs_loss:
            return self._taken_apart(self._call.on_example(self._model, value))
        watch = LossWatch()
        with watch.passing():
            loss = model_loss(self._call.on_example(self._model, value), value)
        try:
            known, targets = watch.known(loss)
        except ValueError as error:  # the batch may have one part only
            self._problem = error
            return loss
        self._is_sum = known.is_sum
        if known.is_sum:
            return loss
        return loss, torch.as_tensor(known.count(targets)).double()

    def _taken_apart(self, output: Any) -> Any:
        """Returns the tensors of an output, and keeps what is around them."""
        found: list[torch.Tensor] = []

        def taken(_: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                found.append(leaf)
                return _Result(len(found) - 1)
            return leaf if isinstance(leaf, _PLAIN) else None  # such as caches of attention

        self._output = replace_leaves(output, taken)
        if not found:
            raise ValueError(f"the model returns no tensor, but {type(output).__name__}")
        return found[0] if len(found) == 1 else tuple(found)

    def output(self) -> TracedOutput:
        """Returns how the results of the graph become the output of the model. Call after the
        trace."""
        return TracedOutput(
            value=self._output,
            has_loss=self._needs_loss,
            is_sum=self._is_sum,
            problem=None if self._problem is None else str(self._problem),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedOutput:
    """The nested values around the results of a graph."""

    value: Any
    has_loss: bool
    """True if the results are the model's own loss and its weight."""
    is_sum: bool
    problem: str | None
    """Why the weight of the loss is not known."""

    def of(self, results: Any) -> Any:
        """Returns the output of the model, from the results of the graph."""
        several: Sequence[Any] = results if isinstance(results, (tuple, list)) else [results]
        if not self.has_loss:
            return replace_leaves(
                self.value,
                lambda _, leaf: several[leaf.place] if isinstance(leaf, _Result) else leaf,
            )
        weight = several[1] if len(several) > 1 else None
        return TracedLoss(several[0], weight, self.problem)
