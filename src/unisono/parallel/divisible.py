"""The interface of modules that can be divided over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from unisono.parallel.training_mesh import TrainingMesh


@runtime_checkable
class Divisible(Protocol):
    """A module that computes the whole in one process, and a part of it after `divide`."""

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's block of each parameter, and communicates over the mesh's groups.

        Blocks are cut with `parameter_block.cut`. Raises `ValueError` for a mesh that cannot
        divide the module.
        """


@runtime_checkable
class Balanced(Protocol):
    """A module that adds a loss of its own, such as experts whose load is balanced."""

    auxiliary_loss: torch.Tensor
    """This rank's part of that loss, over the forward passes since `reset_auxiliary`: the sum over
    the ranks of a stage is the whole."""
    auxiliary_scale: float | None
    """1 / samples of the whole batch. None: of the inputs of each forward pass."""

    def reset_auxiliary(self) -> None:
        """Sets `auxiliary_loss` to zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchPart:
    """The part of a microbatch on one rank."""

    inputs: torch.Tensor
    samples: int
    """Samples of the whole microbatch, on all ranks of `dp` together."""


@runtime_checkable
class Exchanging(Protocol):
    """A model that takes the inputs of a step, and whose traffic depends on their values."""

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank's passes over a step send, by group of `GROUPS`.

        Computed from closed forms, without communication. Sums of gradients do not count.
        """
