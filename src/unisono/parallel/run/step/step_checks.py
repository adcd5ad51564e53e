"""The checks of each step: that it trains the parameters of the run, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.model_checks import check_modules
from unisono.parallel.run.parameters.gradient_hooks import GradientHooks
from unisono.parallel.run.pipeline.model_stages import arrived_at
from unisono.parallel.run.step.graph_checks import graph_fault, region_fault
from unisono.parallel.run.step.step_errors import StepErrors
from unisono.torch_backend import own_parameters, storage_number, version_of


class StepChecks:
    """Finds faults of this rank in a step; all ranks raise them before the weights change."""

    def __init__(
        self, model: DividedModel, hooks: GradientHooks, errors: StepErrors, *, parts: int
    ) -> None:
        """`parts`: the number of parts of a batch, over ranks and microbatches."""
        self._model, self._hooks, self._errors, self._parts = model, hooks, errors, parts
        self._held = {each.values: each for each in (*model.frozen, *model.trained)}
        modules = [module for stage in model.modules for module in stage.modules()]
        self._slots = [
            (own_parameters(module), key, parameter, self._held[parameter].name)
            for module in dict.fromkeys(modules)
            for key, parameter in own_parameters(module).items()
            if parameter is not None
        ]
        """For each parameter of a module: where the module keeps it, and its name in the model."""
        self._split = [
            (each.name, values, values.shape, values.stride(), storage_number(values))
            for values, each in self._held.items()
            if isinstance(values, DTensor)
        ]
        """For each split parameter: its name, shape and strides, and the number of its storage."""
        self.note_arrays()
        self._zero, self._experts = model.mesh.layout.zero, model.mesh.group("ep")
        self._has_loss = False
        for stage in model.modules:
            self._check_once(stage)

    def divide(self, parts: int) -> None:
        """Checks the stages for batches of another number of parts, in the next step.

        Raises `ValueError` for modules whose results depend on the parts.
        """
        if parts > 1 and self._parts == 1:
            for stage in self._model.modules:
                check_modules(stage, parts=parts, zero=self._zero)
                self._check_once(stage)
            self._has_loss = False
        self._parts = parts

    def begin(self) -> None:
        """Begins a step: checks what the program has changed, and adopts its values."""
        self._errors.check(self._require_kept)
        self._errors.check(self._hooks.require_no_new)
        for each in self._model.sets:
            self._errors.check(each.adopt)

    def note_arrays(self) -> None:
        """Notes the arrays that the run has given to the optimizers."""
        self._arrays = self._arrays_now()

    def _arrays_now(self) -> set[int]:
        """Returns the ids of the optimizers' arrays, which the run keeps alive."""
        return {id(each) for group in self._model.optimizers.groups for each in group["params"]}

    def _require_kept(self) -> None:
        """Raises `ValueError` if the program trains or uses other parameters than the run's."""
        found = self._arrays_now()
        if found != self._arrays:
            raise ValueError(
                f"optimizer: expected the {len(self._arrays)} arrays that parallelize gave it, got "
                f"{len(found)}, of which {len(found - self._arrays)} are others; gradients of "
                "parameters that are added later are not summed over the ranks, so pass all "
                "parameters to parallelize"
            )
        for each in self._model.frozen:
            if each.values.requires_grad:
                raise ValueError(
                    f"{each.name}: requires a gradient now, but did not when parallelize was "
                    "called; freeze parameters that a later step trains after parallelize"
                )
        for number, (name, split, shape, stride, storage) in enumerate(self._split):
            if storage_number(split) != storage:
                # torch keeps the values of a DTensor elsewhere, and would use these on
                split.data = DTensor.from_local(
                    split.to_local(),
                    split.device_mesh,
                    split.placements,
                    run_check=False,
                    shape=shape,
                    stride=stride,
                )
                self._split[number] = name, split, shape, stride, storage_number(split)
                raise ValueError(
                    f"{name}: the program assigned to its data, which a split parameter (DTensor) "
                    "ignores; change values in place, for example parameter.data.mul_(2) or "
                    "load_state_dict of torch.distributed.checkpoint; zero = 1 works"
                )
        for slots, key, parameter, name in self._slots:
            present = slots.get(key)
            if present is parameter:
                continue
            # between steps, a module may also have the parameter that `fully_shard` has gathered
            is_gathered = isinstance(parameter, DTensor) and not isinstance(present, DTensor)
            if not (is_gathered and present is not None):
                raise ValueError(
                    f"{name}: the model has another parameter than parallelize received, so "
                    "training would not change it; copy values with load_state_dict(assign=False) "
                    "or parameter.copy_"
                )

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Surrounds the passes of a step, which may not change parameters.

        If this rank has a fault already, its error is that of the passes too.
        """
        before = self._version_sum()
        try:
            yield
            if self._experts is not None:
                # a rank whose peer called a layer of experts alone would wait elsewhere
                dist.barrier(group=self._experts)
        except Exception as error:
            if self._errors.fault is not None:
                raise ValueError(self._errors.fault) from error
            raise
        if self._version_sum() != before:
            self._errors.note_fault(
                "a forward pass changed a parameter in place, as embeddings with max_norm do, so "
                "training would depend on the layout; change parameters between steps; one rank "
                "with one microbatch works"
            )

    def check_loss(self, loss: torch.Tensor, output: object, targets: object) -> None:
        """Checks the graph of the run's first loss."""
        if not self._has_loss and loss.requires_grad:
            self._has_loss = True
            self._check(loss, (output, targets))
            self._check_regions(loss, ())

    def _check_once(self, stage: nn.Module) -> None:
        """Checks the graph of a stage's first pass with gradients."""

        def check(_: nn.Module, arguments: object, results: object) -> None:
            if torch.is_grad_enabled():
                handle.remove()
                received = (arguments, arrived_at(stage))
                self._check(results, received)
                if isinstance(results, torch.Tensor):  # others may have values that no loss uses
                    self._check_regions(results, received)

        handle = stage.register_forward_hook(check)

    def _check(self, results: object, inputs: object) -> None:
        found = graph_fault(
            results,
            inputs,
            lambda: set(map(id, self._parameters())),
            parts=self._parts,
            zero=self._zero,
        )
        if found is not None:
            self._errors.note_fault(found)

    def _check_regions(self, results: object, inputs: object) -> None:
        """Checks that the ranks of `tp` sum what the plan divides in a stage."""
        if not self._model.is_planned:
            return
        pairs = [(each, each) for each in self._held]
        pairs += [pair for module in self._model.gathered for pair in module.pairs]
        blocks = {id(used): self._held[own] for own, used in pairs if own in self._held}
        found = region_fault(results, inputs, blocks)
        if found is not None:
            self._errors.note_fault(found)

    def _parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that the passes use."""
        gathered = self._model.gathered
        return [*self._held, *(whole for module in gathered for _, whole in module.pairs)]

    def _version_sum(self) -> int:
        """Returns a number that each write to a parameter increases. Gathered parameters, which
        torch makes in the first step, begin with version 0."""
        if self._parts == 1 and self._zero < 2:
            return 0
        return sum([version_of(each) for each in self._parameters()])
