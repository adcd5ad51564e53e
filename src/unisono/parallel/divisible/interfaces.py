"""The interface of modules that can be divided over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from unisono.parallel.training_mesh import TrainingMesh

ALL_ACTIVATIONS = ("cp", "sequence_parallel", "tensor")
"""The ways in which a layout divides activations between modules: positions over `cp`, positions
over `tp` by `sequence_parallel`, and samples and features over `tp` in 2D to 3D (`tensor`)."""


@runtime_checkable
class Divisible(Protocol):
    """A module that computes its whole result, or after `divide` only this rank's part of it.

    Its inputs and results between modules are whole, if the class does not have the attribute
    `serves`: those of `ALL_ACTIVATIONS` for which forward is right, such as `serves = ("cp",)`.
    Other layouts are refused. A subclass with a forward of its own states `serves` again.
    """

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's block of each parameter, by `cut`.

        From then on, forward and backward passes communicate over the groups of the mesh. Called
        once, by `parallelize`, on all ranks. Raises `ValueError` for a mesh that cannot divide the
        module.
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
    """Number of samples of the part."""
    tokens: int
    """Number of tokens of the part, before sequence parallelism splits them."""
    whole_samples: int
    """Number of samples of the whole microbatch, over all ranks of `dp`."""
    item_bytes: int
    """Bytes of an element of an activation."""
    wide_bytes: int
    """Bytes of an element of a loss, of a router's scores, and of keys in a divided sequence."""


@runtime_checkable
class Exchanging(Protocol):
    """A module that communicates in its passes. Reports predict its traffic."""

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank sends in a step's forward and backward passes.

        `parts`: this rank's microbatches. The keys are names of `GROUPS`.

        The bytes come from closed forms, or from the sizes of the last step, without communication.
        They exclude sums of gradients, and what the modules inside send.
        """


Attached = TypeVar("Attached")
_ATTACHED = "unisono_attached"


def attach(module: nn.Module, found: object) -> None:
    """Attaches an object to a module, which keeps its class: the object divides the module."""
    vars(module)[_ATTACHED] = (*vars(module).get(_ATTACHED, ()), found)


def attached(model: nn.Module, kind: type[Attached]) -> Iterator[Attached]:
    """Yields the objects of a kind that are attached to the modules of a model."""
    for module in model.modules():
        yield from (each for each in vars(module).get(_ATTACHED, ()) if isinstance(each, kind))


def exchanging(model: nn.Module) -> Iterator[Exchanging]:
    """Yields the modules of a model, and the objects attached to them, that communicate."""
    yield from (each for each in model.modules() if isinstance(each, Exchanging))
    yield from attached(model, Exchanging)  # type: ignore[type-abstract]
