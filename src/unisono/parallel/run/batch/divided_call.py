"""Calls of a model that computes a part of each sequence (`cp`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from unisono.parallel.context import ContextAttention
from unisono.parallel.divisible.interfaces import has_divisible
from unisono.parallel.expert_stacks import find_stacks
from unisono.parallel.positions import (
    DividedPositions,
    Placed,
    SequencePart,
    placement_of,
    sequence_length,
)
from unisono.parallel.run.activation_checks import modules_of_positions
from unisono.parallel.run.batch.batch_parts import divided_length
from unisono.parallel.run.batch.batch_tree import replace_leaves, tensors_in
from unisono.parallel.run.batch.model_call import Call, ModelCall
from unisono.parallel.run.pipeline.model_stages import arrived_at
from unisono.parallel.training_mesh import TrainingMesh

_CACHE = "use_cache"


def make_call(
    model: nn.Module, call: Call | None, mesh: TrainingMesh, *, owns_loss: bool
) -> ModelCall:
    """Returns how the model is called: with whole sequences, if `cp` divides its calls.

    `owns_loss`: the loss that the model computes is that of the run.
    """
    if mesh.layout.cp > 1 and not has_divisible(model):  # its modules know nothing of cp
        return DividedCall(model, call, mesh, owns_loss=owns_loss)
    return ModelCall(model, call)


class DividedCall(ModelCall):
    """Calls a model with whole sequences, of which it computes this rank's positions."""

    keeps_sequences = True

    def __init__(
        self, model: nn.Module, call: Call | None, mesh: TrainingMesh, *, owns_loss: bool
    ) -> None:
        """`owns_loss`: the loss that the model computes is that of the run."""
        super().__init__(model, call)
        self._mesh, self._owns_loss = mesh, owns_loss
        self._attention = ContextAttention("ring", mesh.group("cp"))
        self._watch: DividedPositions | None = None
        self._placed = Placed() if mesh.layout.zero >= 2 else None
        self._is_watching = False
        stacks = [each.module for each in find_stacks(model).stacks if each.keeps_rows]
        self._watch_alone([*modules_of_positions(model), *stacks])

    def prepare(self, module: nn.Module) -> None:
        """Prepares a module that stands in for a module of the model in later calls."""
        self._watch_alone(modules_of_positions(module))

    def _watch_alone(self, modules: Iterable[nn.Module]) -> None:
        """Leaves modules that treat each position alone out of the watch in later calls."""
        for module in dict.fromkeys(modules):
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Returns the output for this rank's positions of a batch."""
        with self._watching(model, batch) as watch:
            return super().__call__(model, self._divided(batch, watch))

    def on_example(self, model: nn.Module, value: Any) -> Any:
        """Returns the output for this rank's positions of an example.

        Raises `ValueError` for an example whose sequences the ranks cannot divide.
        """
        divided_length([*tensors_in(value)], self._mesh)
        return super().on_example(model, value)

    def resume(self, stage: nn.Module, arrived: Any, inputs: Any) -> Any:
        """Returns the result of a later stage for this rank's positions."""
        with self._watching(stage, inputs) as watch:
            watch.note(tensors_in(arrived))
            return super().resume(stage, arrived, inputs)

    def again(self) -> AbstractContextManager[None] | None:
        """Returns the context of the backward pass of the last call."""
        return None if self._watch is None else self._watching_again(self._watch)

    @contextmanager
    def _watching_again(self, watch: DividedPositions) -> Iterator[None]:
        self._is_watching = True
        try:
            with watch.again():
                yield
        finally:
            self._is_watching = False

    def _enter(self, module: nn.Module, args: Any, options: dict[str, Any]) -> None:
        if self._is_watching and self._watch is not None:
            self._watch.enter_alone(module, (*args, *options.values()))

    def _leave(self, module: nn.Module, _: Any, results: Any) -> None:
        if self._is_watching and self._watch is not None:
            self._watch.leave_alone(module, results)

    @contextmanager
    def _watching(self, model: nn.Module, batch: Any) -> Iterator[DividedPositions]:
        """Watches a call of a model, or of a stage of it."""
        length, layout = sequence_length(tensors_in(batch)), self._mesh.layout
        assert length is not None  # the batch has been divided
        part = SequencePart(length=length, rank=self._mesh.coordinates["cp"], ranks=layout.cp)
        self._watch = watch = DividedPositions(
            part, self._attention, model, owns_loss=self._owns_loss, placed=self._placed
        )
        watch.note(tensors_in(arrived_at(model)))
        self._is_watching = True
        try:
            with watch:
                yield watch
        finally:
            self._is_watching = False

    def _divided(self, batch: Any, watch: DividedPositions) -> Any:
        """Returns a batch whose vectors of each position are divided."""
        length = sequence_length(tensors_in(batch))

        def divided(_: str, leaf: Any) -> Any:
            is_vectors = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            if is_vectors and leaf.dim() > 2 and leaf.shape[1] == length:
                return watch.divide(leaf)
            return leaf

        return replace_leaves(batch, divided)

    def check_output(self, output: Any, samples: int) -> None:
        """Raises `ValueError` for an output that a loss could not combine with a part of the
        targets, which has some positions of each sample."""
        for each in () if self._owns_loss else tensors_in(output):
            found, shape = placement_of(each), tuple(each.shape)
            before = 0 if found is None else math.prod(shape[: found.dim]) * found.outer
            if each.is_floating_point() and (before == 0 or before % samples):
                layout = self._mesh.layout
                raise ValueError(
                    f"cp = {layout.cp} divides positions over the ranks, but an output of the model"
                    f" of shape {shape} is not divided by positions; expected outputs (samples, "
                    "positions, ...) that are computed from an embedding of the tokens; dp = "
                    f"{layout.dp * layout.cp} without cp works"
                )

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the model, without a cache of keys, which training does not
        use."""
        arguments, keywords = super()._arguments(batch)
        if _CACHE in self._names:
            keywords.setdefault(_CACHE, False)
        return arguments, keywords
