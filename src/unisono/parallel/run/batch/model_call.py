"""How a model is called with a batch: by the names or the order of its forward's arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from unisono.parallel.run.batch.batch_tree import fields_of, tensors_in
from unisono.parallel.run.pipeline.block_stages import BlockStage

Call = Callable[[nn.Module, Any], Any]
"""Computes a model's output from a batch, or from a part of it."""

_Kinds = inspect.Parameter
_ORDERED = (_Kinds.POSITIONAL_ONLY, _Kinds.POSITIONAL_OR_KEYWORD)
_NAMED = (_Kinds.POSITIONAL_OR_KEYWORD, _Kinds.KEYWORD_ONLY)
_SEVERAL = (_Kinds.VAR_POSITIONAL, _Kinds.VAR_KEYWORD)


class ModelCall:
    """Calls a model with the values of a batch that its signature names.

    - A mapping becomes keyword arguments. Keys that `forward` does not take are for the loss. If it
      takes none of the keys, the mapping is its only argument.
    - A dataclass and a named tuple are passed by the names of their fields, too, if `forward` takes
      them.
    - Other tuples and lists become positional arguments. Values after those that `forward` takes
      are for the loss.
    - Anything else is the only argument.
    """

    keeps_sequences = False
    """True if the call takes whole sequences, and computes a part of the positions."""

    def __init__(self, model: nn.Module, call: Call | None = None) -> None:
        """`call`: computes the output in place of these rules."""
        self.own = call
        self._name = type(model).__name__
        parameters = _parameters(model)
        kinds = [each.kind for each in parameters]
        self._takes_any_name = _Kinds.VAR_KEYWORD in kinds
        self._takes_any_number = _Kinds.VAR_POSITIONAL in kinds
        self._names = {each.name for each in parameters if each.kind in _NAMED}
        self._count = sum(kind in _ORDERED for kind in kinds)
        self._needed = {
            each.name: place if each.kind in _ORDERED else math.inf
            for place, each in enumerate(parameters)
            if each.default is _Kinds.empty and each.kind not in _SEVERAL
        }
        """The place of each argument without a default; infinite for one that has only a name."""

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Returns the output of the model, or of a stage of its pipeline, for a batch or for the
        inputs of `step(inputs, targets)`."""
        if self.own is not None:
            if isinstance(model, BlockStage):
                return model.called_by(self.own, batch)
            return self.own(model, batch)
        arguments, keywords = self._arguments(batch)
        return model(*arguments, **keywords)

    def on_example(self, model: nn.Module, value: Any) -> Any:
        """Returns the output for an example of a batch."""
        return self(model, value)

    def resume(self, stage: nn.Module, arrived: Any, inputs: Any) -> Any:
        """Returns the result of a later stage of a sequence of modules.

        `arrived`: the result of the stage before; `inputs`: those of the first stage.
        """
        return stage(arrived)

    def prepare(self, module: nn.Module) -> None:
        """Prepares a module that stands in for a module of the model in later calls."""

    def check_output(self, output: Any, samples: int) -> None:
        """Raises `ValueError` for an output that a loss cannot combine with its part of the
        targets. `samples`: the number of samples that the call has got."""

    def again(self) -> AbstractContextManager[None] | None:
        """Returns the context that a backward pass needs, in which parts of the last call may run
        again; None if it needs none."""
        return None

    def check(self, batch: Any, *, is_for_loss: bool) -> None:
        """Raises `ValueError` if a batch lacks an argument, or has a value that nobody uses.

        `is_for_loss`: the loss receives the batch, too.
        """
        if self.own is not None:
            return
        arguments, keywords = self._arguments(batch)
        missing = [
            name
            for name, place in self._needed.items()
            if place >= len(arguments) and name not in keywords
        ]
        if missing:
            has = ", ".join(keywords) or f"{len(arguments)} values by position"
            raise ValueError(
                f"batch: {self._name}.forward needs {', '.join(missing)}, but the batch has {has}; "
                "pass a mapping with these names, or parallelize(..., call=f) with f(model, batch)"
            )
        if keywords and not is_for_loss:
            named = batch if isinstance(batch, Mapping) else fields_of(batch)
            unknown = [
                str(key)
                for key, each in named.items()
                if key not in keywords and any(True for _ in tensors_in(each))
            ]
            if unknown:
                raise ValueError(
                    f"batch: {self._name}.forward does not take {', '.join(unknown)}, and the "
                    "model's own loss does not see the batch; leave these values out, or pass "
                    "parallelize(..., call=f) with f(model, batch)"
                )

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments."""
        if isinstance(batch, torch.Tensor):
            return (batch,), {}
        named = batch if isinstance(batch, Mapping) else fields_of(batch)
        taken = {key: each for key, each in named.items() if key in self._names}
        if self._takes_any_name and (taken or not self._count):
            taken = {key: each for key, each in named.items() if isinstance(key, str)}
        if taken:
            return (), taken
        if isinstance(batch, (tuple, list)):
            return tuple(batch if self._takes_any_number else batch[: self._count]), {}
        return (batch,), {}


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Returns the parameters of a model's forward; those of any call if they are not known."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return [_Kinds("arguments", _SEVERAL[0]), _Kinds("keywords", _SEVERAL[1])]
