"""Sets of parameters whose gradients are summed by the same ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.data_parallelism.flat_parameters import FlatSpan
from unisono.parallel.divisible.parameter_block import ParameterBlock
from unisono.parallel.run.parameters.optimizers import Optimizers
from unisono.parallel.training_mesh import TrainingMesh, sum_elements

Group = dist.ProcessGroup | None
Groups = Mapping[nn.Parameter, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldParameter:
    """A parameter of this rank under its name in the whole model."""

    name: str
    values: nn.Parameter
    block: ParameterBlock
    tie: Group = None
    """Group of this rank and the ranks of other pipeline stages that hold the same parameter; None
    without such ranks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BucketGradient:
    """The gradient of a parameter that has elements in a bucket."""

    held: HeldParameter
    version: Callable[[], int]
    """Returns a number that each change of the gradient changes, except sums over ranks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientBucket:
    """A part of the gradients of a set, which ranks may sum while passes run."""

    name: str
    """Name on all ranks that sum the bucket."""
    nbytes: int
    gradients: Sequence[BucketGradient]
    collect: Callable[[], None]
    """Prepares the gradients for `sum`, after the passes that compute them."""
    sum: Callable[[], None]
    """Sums the gradients over the ranks that see different tokens. Collective. Any thread may call
    it."""


class ParameterSet(ABC):
    """Parameters whose gradients are reduced together, and that are updated together."""

    def __init__(self, held: Sequence[HeldParameter]) -> None:
        """All parameters must have the same groups (`summed_over`, `held_by`), tie and type."""
        self.held = held
        self.trained = [each.values for each in held]
        """Parameters that the optimizer updates."""
        self.spans: Sequence[FlatSpan] = ()
        """The ranges of a flat array that are `trained`; empty if others are trained."""
        self.buckets: Sequence[GradientBucket] = ()
        """All gradients, in parts that may be summed while passes run; empty if only `reduce` may
        sum them. Call `collect` after the passes before the last buckets are summed."""

    @abstractmethod
    def merge(self, groups: Groups) -> Sequence[tuple[nn.Parameter, int | None]]:
        """Makes plain arrays the parameters to train. Returns each array with its group.

        `groups`: the number of the optimizer's group of each trained parameter. An array may hold
        several parameters of one group.
        """

    def adopt(self) -> None:  # noqa: B027
        """Takes over the values that the program assigned to the `data` of parameters.

        Raises `ValueError` for values of another shape or type.
        """

    @abstractmethod
    def zero_gradients(self) -> None:
        """Sets the gradients to zero."""

    @abstractmethod
    def collect(self) -> None:
        """Notes which gradients passes have computed."""

    @abstractmethod
    def reduce(self) -> None:
        """Sums the gradients over the ranks that see different tokens. Collective."""

    @abstractmethod
    def used(self) -> Sequence[bool]:
        """Returns, for each parameter of `held`, whether this rank's backward passes since
        `zero_gradients` gave it a gradient. Call after `reduce` or `collect`.
        """

    def skip(self, unused: Sequence[bool], optimizers: Optimizers) -> None:
        """Sets the gradients of unused parameters of `held` to None, so that the optimizers skip
        them. Call after `reduce`.
        """
        for each, is_unused in zip(self.held, unused, strict=True):
            if is_unused:
                each.values.grad = None

    def divide(self, kinds: Sequence[object], optimizers: Optimizers) -> None:  # noqa: B027
        """Gives the optimizers different arrays for parameters of `held` with different kinds."""

    @abstractmethod
    def squares(self) -> float:
        """Returns this rank's share of the gradients' sum of squares.

        The shares of all ranks add up to the sum of squares of all gradients in the set.
        """

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiplies the gradients by a factor."""

    def gather(self) -> None:  # noqa: B027
        """Gathers the whole parameters after the optimizer's step. Collective."""

    @abstractmethod
    def traffic(self, microbatches: int) -> dict[str, float]:
        """Returns the bytes that a rank sends in a step, by group.

        Counts the sums of gradients and the gathers of parameters. Sums over ties (parameters of
        several pipeline stages) count for `pp`.
        """


def attach_gradients(spans: Sequence[FlatSpan], gradient: torch.Tensor, *, begin: int = 0) -> None:
    """Makes the gradients of spans views of an array whose first element has the index `begin`."""
    for each in spans:
        first = each.first - begin
        each.weights.grad = gradient[first : first + each.weights.numel()]


def sum_over(groups: Sequence[Group], values: torch.Tensor, dtype: torch.dtype) -> None:
    """Adds the values of the ranks of each group, in a type that may differ from their own."""
    present = [group for group in groups if group is not None]
    shared = values.to(dtype) if present else values
    for group in present:
        dist.all_reduce(shared, group=group)
    if shared is not values:
        values.copy_(shared)


def sum_traffic(
    groups: Sequence[tuple[str, Group]], summed: Sequence[tuple[torch.Tensor, torch.dtype]]
) -> dict[str, float]:
    """Returns, for each group, the bytes that this rank sends to sum the tensors over the group.

    A sum is an all_reduce, or a reduce_scatter and an all_gather. `summed`: each tensor with the
    type in which it is sent.
    """
    found: dict[str, float] = {}
    for name, group in groups:
        if group is None:
            continue
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        found[name] = sum(
            sum_elements(values.numel(), ranks=ranks, rank=rank) * dtype.itemsize
            for values, dtype in summed
        )
    return found


def shard_name(block: ParameterBlock) -> str:
    """Returns the name of the group across which a parameter is split by ZeRO."""
    return {"expert_tokens": "expert_shard", "own": "own"}.get(block.summed_over, "shard")


def replicas(held: HeldParameter, mesh: TrainingMesh) -> int:
    """Returns the number of ranks that hold a parameter's block.

    Includes all pipeline stages that share the parameter (its tie).
    """
    copies = 1 if held.tie is None else dist.get_world_size(held.tie)
    return copies * len(mesh.ranks(held.block.held_by))


_BLOCK = 2**16  # elements whose squares are added in float32; more elements would add more error
_SMALLEST = 1e-25  # below this sum, squares in float32 may have lost bits to underflow


def sum_of_squares(x: torch.Tensor) -> float:
    """Returns the sum of squares of an array, as precise as float32 products permit.

    Dot products of blocks take a third of the time of a norm in float64. Arrays of other types, and
    arrays whose squares exceed the range of float32, are added in float64.

    >>> sum_of_squares(torch.tensor([3.0, 4.0]))
    25.0
    >>> f"{sum_of_squares(torch.tensor([3e30, 4e30])):.6g}"
    '2.5e+61'
    >>> sum_of_squares(torch.tensor([3.0 + 4.0j]))
    25.0
    """
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.dtype in (torch.float32, torch.float64) and x.is_contiguous():
        blocks = torch.split(x.detach().view(-1), _BLOCK)
        found = sum((float(torch.dot(block, block)) for block in blocks), 0.0)
        if _SMALLEST < found < math.inf:
            return found
    norm: torch.Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return float(norm.square())
