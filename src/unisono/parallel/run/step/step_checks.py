"""The checks of each step: that it trains the parameters of the run, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.run.model_checks import check_lookups, check_means
from unisono.parallel.run.parameters.gathered_module import GatheredModule
from unisono.parallel.run.parameters.gradient_hooks import GradientHooks
from unisono.parallel.run.parameters.optimizers import Optimizers
from unisono.parallel.run.parameters.parameter_sets import Group, HeldParameter, ParameterSet
from unisono.parallel.run.pipeline.block_stages import BlockStage
from unisono.parallel.run.step.graph_checks import NamedBlock, graph_fault, region_fault
from unisono.parallel.run.step.kept_parameters import KeptParameters
from unisono.parallel.run.step.step_errors import StepFaults
from unisono.torch_backend import version_of


class StepChecks:
    """Finds faults of this rank in a step; all ranks raise them before the weights change."""

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        sets: Sequence[ParameterSet],
        frozen: Sequence[HeldParameter],
        gathered: Sequence[GatheredModule],
        kept: KeptParameters,
        hooks: GradientHooks,
        *,
        parts: int,
        zero: int,
        experts: Group,
        is_planned: bool,
    ) -> None:
        """`parts`: the number of parts of a batch, over ranks and microbatches. `experts`: the
        group that exchanges the tokens of experts. `is_planned`: a plan divides modules.
        """
        self.kept, self.hooks = kept, hooks
        self.faults = StepFaults()
        held = [*frozen, *(held for each in sets for held in each.held)]
        self._own = [each.values for each in held]
        self._held = {each.values: each for each in held}
        self._is_planned = is_planned
        self._gathered = gathered
        self._parts, self._zero, self._experts = parts, zero, experts
        self._has_loss = False
        self._stages = [stage for _, stage in stages]
        for stage in self._stages:
            self._check_once(stage)

    def divide(self, parts: int) -> None:
        """Checks the stages for batches of another number of parts, in the next step.

        Raises `ValueError` for modules whose results depend on the parts.
        """
        if parts > 1 and self._parts == 1:
            for stage in self._stages:
                check_means(stage, parts=parts)
                check_lookups(stage, parts=parts, zero=self._zero)
                self._check_once(stage)
            self._has_loss = False
        self._parts = parts

    def begin(self, optimizers: Optimizers, sets: Sequence[ParameterSet]) -> None:
        """Begins a step: checks what the program has changed, and adopts its values."""
        self.faults.restart()
        self.faults.check(lambda: self.kept.require(optimizers))
        self.faults.check(self.hooks.require_no_new)
        for each in sets:
            self.faults.check(each.adopt)

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
            if self.faults.own is not None:
                raise ValueError(self.faults.own) from error
            raise
        if self._version_sum() != before:
            self.faults.note(
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
                received = (
                    (arguments, stage.arrived) if isinstance(stage, BlockStage) else arguments
                )
                self._check(results, received)
                if isinstance(results, torch.Tensor):  # others may have values that no loss uses
                    self._check_regions(results, received)

        handle = stage.register_forward_hook(check)

    def _check(self, results: object, inputs: object) -> None:
        found = graph_fault(results, inputs, self._known, parts=self._parts, zero=self._zero)
        if found is not None:
            self.faults.note(found)

    def _check_regions(self, results: object, inputs: object) -> None:
        """Checks that the ranks of `tp` sum what the plan divides in a stage."""
        if not self._is_planned:
            return
        pairs = [(each, each) for each in self._held]
        pairs += [pair for module in self._gathered for pair in module.pairs]
        blocks = {
            id(used): NamedBlock(name=held.name, parameter=used, block=held.block)
            for own, used in pairs
            if (held := self._held.get(own)) is not None
        }
        found = region_fault(results, inputs, blocks)
        if found is not None:
            self.faults.note(found)

    def _known(self) -> set[int]:
        return {id(each) for each in self._parameters()}

    def _parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that the passes use."""
        whole = [each for module in self._gathered for each in module.whole_parameters]
        return [*self._own, *whole]

    def _version_sum(self) -> int:
        """Returns a number that each write to a parameter increases. Gathered parameters, which
        torch makes in the first step, begin with version 0."""
        if self._parts == 1 and self._zero < 2:
            return 0
        return sum([version_of(each) for each in self._parameters()])
