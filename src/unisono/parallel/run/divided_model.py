"""This rank's part of a model: its stages, its parameters and their optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from unisono.parallel.precision import Precision
from unisono.parallel.run.parameters.gathered_module import CallOrder, GatheredModule
from unisono.parallel.run.parameters.optimizers import Optimizers
from unisono.parallel.run.parameters.parameter_sets import HeldParameter, ParameterSet
from unisono.parallel.training_mesh import TrainingMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedModel:
    """A model that a layout has divided, as this rank has it."""

    mesh: TrainingMesh
    precision: Precision
    stages: Sequence[tuple[int, nn.Module]]
    """Number and modules of each stage of this rank."""
    names: Sequence[str]
    """The trained parameters of the whole model."""
    sets: Sequence[ParameterSet]
    """The trained parameters of this rank."""
    frozen: Sequence[HeldParameter]
    """The other parameters of this rank."""
    gathered: Sequence[GatheredModule]
    """The modules that gather parameters."""
    calls: CallOrder
    """The order of the calls of these modules."""
    optimizers: Optimizers
    groups: Sequence[Sequence[str]]
    """The names of the parameters of each group of the optimizers."""
    is_planned: bool
    """A plan has divided modules."""
    is_balanced: bool
    """A stage, perhaps of another rank, has balance losses."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of each stage."""
        return [stage for _, stage in self.stages]

    @property
    def trained(self) -> list[HeldParameter]:
        """The trained parameters of this rank, one by one."""
        return [held for each in self.sets for held in each.held]
