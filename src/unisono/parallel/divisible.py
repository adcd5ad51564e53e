"""The interface of modules that can be divided over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from unisono.parallel.training_mesh import TrainingMesh


@runtime_checkable
class Divisible(Protocol):
    """A module that computes its whole result, or after `divide` only this rank's part of it."""

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's block of each parameter.

        From then on, forward and backward passes communicate over the mesh.

        Blocks are cut with `parameter_block.cut`. Raises `ValueError` for a mesh that cannot
        divide the module.
        """


def has_divisible(model: nn.Module) -> bool:
    """Returns True if a model has modules with a method `divide(mesh)`."""
    return any(isinstance(each, Divisible) for each in model.modules())


@runtime_checkable
class Balanced(Protocol):
    """A module with an auxiliary loss, such as a loss that balances the load of experts."""

    auxiliary_loss: torch.Tensor
    """This rank's part of the auxiliary loss of the forward passes since `reset_auxiliary`. The sum
    over the ranks of a pipeline stage is the whole loss."""
    auxiliary_scale: float | None
    """Factor of the loss: 1 / (number of samples of the whole batch). None: 1 / (number of samples
    of each forward pass)."""

    def reset_auxiliary(self) -> None:
        """Sets `auxiliary_loss` to zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchPart:
    """A rank's part of a microbatch."""

    inputs: torch.Tensor
    samples: int
    """Number of samples of the whole microbatch, over all ranks of `dp`."""


@runtime_checkable
class Exchanging(Protocol):
    """A model whose traffic depends on the values of its inputs."""

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank sends in a step's forward and backward passes.

        The keys are names of `GROUPS`.

        The bytes come from closed forms, without communication, and exclude sums of gradients.
        """
