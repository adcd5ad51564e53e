"""Hooks of parameters (`register_hook`), called once in a step with the gradient of the batch.

A backward pass computes the gradient of one rank's microbatch. A hook that clips or masks this part
would not give what it gives in one process. So the run takes the hooks away, and calls them with
the sum over all ranks and microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.run.parameters.parameter_sets import HeldParameter, ParameterSet
from unisono.parallel.training_mesh import TrainingMesh
from unisono.torch_backend import (
    gradient_hook_counts,
    gradient_hooks,
    remove_gradient_hooks,
    version_of,
)

_PRECISION = 1e-6  # relative difference of results that rounding may explain

Hooks = tuple[Mapping[int, Any], Mapping[int, Any]]
"""The hooks of `register_hook`, and those of `register_post_accumulate_grad_hook`."""


def take_hooks(model: nn.Module) -> dict[str, Hooks]:
    """Removes the hooks of a whole model's trained parameters; returns them by name."""
    found = {}
    for name, each in model.named_parameters():
        hooks = gradient_hooks(each)
        if any(hooks) and each.requires_grad:
            found[name] = hooks
            remove_gradient_hooks(each)
    return found


class GradientHooks:
    """The hooks of the parameters of a run."""

    def __init__(
        self, hooks: Mapping[str, Hooks], sets: Sequence[ParameterSet], mesh: TrainingMesh
    ) -> None:
        """`hooks`: those of the whole model, by name.

        Raises `ValueError` for a hook of a parameter whose gradient no rank has as a whole.
        """
        self._names, self.exist = list(hooks), bool(hooks)
        self._sets, self._mesh, self._hooks = sets, mesh, hooks
        every = [held for each in sets for held in each.held]
        self._parameters = [held.values for held in every]
        self._parameter_names = [held.name for held in every]
        self._counts = gradient_hook_counts(self._parameters)
        layout = mesh.layout
        for held in (each for each in every if each.name in hooks):
            if layout.zero or tuple(held.values.shape) != held.block.shape:
                cause = f"zero = {layout.zero}" if layout.zero else layout.text()
                raise ValueError(
                    f"{held.name}: has a hook for its gradient, but with {cause} each rank has a "
                    "part of the gradient; change gradients in the optimizer's step; "
                    f"{'zero = 0' if layout.zero else f'dp = {layout.devices}'} works"
                )

    def require_no_new(self) -> None:
        """Raises `ValueError` if the program has registered a hook after `parallelize`."""
        counts = gradient_hook_counts(self._parameters)
        if counts == self._counts:
            return
        pairs = enumerate(zip(counts, self._counts, strict=True))
        for number in (number for number, (now, before) in pairs if now > before):
            raise ValueError(
                f"{self._parameter_names[number]}: got a hook for its gradient after parallelize, "
                "which a backward pass would call with the gradient of one rank's microbatch; "
                "register hooks before parallelize, which calls them with the gradient of the batch"
            )

    @torch.no_grad()
    def call(self, *, is_failed: bool, weight: float, scale: Callable[[float], None]) -> bool:
        """Calls the hooks of parameters that a rank has used. Collective; call after `reduce`.
        Returns True if it has scaled the gradients.

        `is_failed`: this rank has failed in the step. Then no rank calls hooks, since gradients are
        incomplete, and the exchange of the loss tells the error. `weight`: the weight of this
        rank's losses; `scale(sum of weights)` makes the gradients those of the batch's loss, since
        a hook need not be linear. Raises `ValueError` on all ranks
        if the results of ranks differ, or if a hook changes the parameter or removes its gradient.
        Raises the error of a hook on this rank after the other ranks have their results.
        """
        own = {
            held.name: (held, is_used)
            for each in self._sets
            for held, is_used in zip(each.held, each.used(), strict=True)
        }
        used = [float(name in own and own[name][1]) for name in self._names]
        shared = torch.tensor([*used, float(is_failed), weight], dtype=torch.float64)
        self._add(shared)
        *counts, failures, weight = shared.tolist()
        if failures:
            return False
        scale(weight)
        results: list[list[float]] = [[] for _ in self._names]
        error: Exception | None = None
        try:
            for place, (name, count) in enumerate(zip(self._names, counts, strict=True)):
                if name in own and count:
                    results[place] = list(self._results(name, own[name][0]))
        except Exception as caught:
            error = caught
        fault = self._compare(results)
        if error is not None:
            raise error
        if fault is not None:
            raise ValueError(fault)
        return True

    def _add(self, shared: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduces an array over all ranks."""
        if self._mesh.all_ranks is not None:
            dist.all_reduce(shared, op, group=self._mesh.all_ranks)

    def _results(self, name: str, held: HeldParameter) -> Iterator[float]:
        """Calls the hooks of a parameter; yields a number that reveals another result."""
        parameter = held.values
        gradient = parameter.grad
        assert gradient is not None
        version = version_of(parameter)
        before, after = self._hooks[name]
        for hook in list(before.values()):
            found = hook(gradient)
            if found is not None:
                gradient.copy_(found)
        for hook in list(after.values()):
            hook(parameter)
            if parameter.grad is None or version_of(parameter) != version:
                yield math.nan
                return
            if parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
                parameter.grad = gradient
        flat = torch.nan_to_num(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
        flat = flat.double().flatten()
        yield float((flat * torch.linspace(1, 2, len(flat), dtype=flat.dtype)).sum())

    def _compare(self, results: Sequence[Sequence[float]]) -> str | None:
        """Returns a message if a result is NaN, or differs between ranks. Collective."""
        numbers = [each[0] if each else -math.inf for each in results]
        opposite = [-each[0] if each else -math.inf for each in results]
        wrong = [float(math.isnan(each)) for each in numbers]
        shared = torch.nan_to_num(torch.tensor([numbers, opposite, wrong], dtype=torch.float64))
        self._add(shared, dist.ReduceOp.MAX)
        for name, most, least, is_wrong in zip(self._names, *shared.tolist(), strict=True):
            if is_wrong:
                return (
                    f"{name}: a hook changed the parameter or removed its gradient; expected hooks "
                    "that change the gradient, and the optimizer as an argument of parallelize"
                )
            if most + least > _PRECISION * max(abs(most), abs(least)):
                return (
                    f"{name}: a hook returned different gradients on the ranks; expected a "
                    "function of the gradient alone, without random numbers"
                )
        return None
