"""Sets of parameters whose gradients are summed by the same ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.data_parallelism.flat_parameters import FlatParameters, FlatSpan
from unisono.parallel.data_parallelism.parameter_block import ParameterBlock
from unisono.parallel.precision import Precision
from unisono.parallel.rank_grid import GROUPS
from unisono.parallel.run.divided_spans import divide_spans, skip_ranges
from unisono.parallel.run.sum_of_squares import sum_of_squares
from unisono.parallel.training_mesh import TrainingMesh, sum_elements
from unisono.torch_backend import all_gather_single, reduce_scatter_single

Group = dist.ProcessGroup | None
Groups = Mapping[nn.Parameter, int]

_SPAN_ELEMENTS = 2**18  # longer spans leave the cache between the operations of an optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldParameter:
    """A parameter of this rank under its name in the whole model."""

    name: str
    values: nn.Parameter
    block: ParameterBlock
    tie: Group = None
    """Group of this rank and the ranks of other pipeline stages that hold the same parameter; None
    without such ranks."""


class ParameterSet(Protocol):
    """Parameters whose gradients are reduced together, and that are updated together."""

    @property
    def held(self) -> Sequence[HeldParameter]:
        """Parameters of the model in this set."""

    @property
    def trained(self) -> Sequence[nn.Parameter]:
        """Parameters that the optimizer updates."""

    @property
    def spans(self) -> Sequence[FlatSpan]:
        """The ranges of a flat array that are `trained`; empty if others are trained."""

    def merge(self, groups: Groups) -> Sequence[tuple[nn.Parameter, int | None]]:
        """Makes plain arrays the parameters to train. Returns each array with its group.

        `groups`: the number of the optimizer's group of each trained parameter. An array may hold
        several parameters of one group.
        """

    def adopt(self) -> None:
        """Takes over the values that the program assigned to the `data` of parameters.

        Raises `ValueError` for values of another shape or type.
        """

    def zero_gradients(self) -> None:
        """Sets the gradients to zero."""

    def reduce(self) -> None:
        """Sums the gradients over the ranks that see different tokens. Collective."""

    def used(self) -> Sequence[bool]:
        """Returns, for each parameter of `held`, whether this rank's backward passes since
        `zero_gradients` gave it a gradient. Call after `reduce`.
        """

    def skip(self, unused: Sequence[bool], optimizer: torch.optim.Optimizer) -> None:
        """Sets the gradients of unused parameters of `held` to None, so that the optimizer skips
        them. Call after `reduce`.
        """

    def divide(self, kinds: Sequence[object], optimizer: torch.optim.Optimizer) -> None:
        """Gives the optimizer different arrays for parameters of `held` with different kinds."""

    def squares(self) -> float:
        """Returns this rank's share of the gradients' sum of squares.

        The shares of all ranks add up to the sum of squares of all gradients in the set.
        """

    def scale(self, factor: float) -> None:
        """Multiplies the gradients by a factor."""

    def gather(self) -> None:
        """Gathers the whole parameters after the optimizer's step. Collective."""

    def traffic(self, microbatches: int) -> dict[str, float]:
        """Returns the bytes that a rank sends in a step, by group.

        Counts the sums of gradients and the gathers of parameters. Sums over ties (parameters of
        several pipeline stages) count for `pp`.
        """


class _FlatSet:
    """Parameters whose weights and gradients are views of two flat arrays."""

    def __init__(self, held: Sequence[HeldParameter], precision: Precision, *, parts: int) -> None:
        """All parameters must have the same groups (`summed_over`, `held_by`), tie and type."""
        self.held = held
        self._reduced = precision.reduced(held[0].values.dtype)
        self._names = [each.name for each in held]
        self.trained = [each.values for each in held]
        self.spans: Sequence[FlatSpan] = ()
        self._flat = FlatParameters(self.trained, parts=parts)
        self._tie = held[0].tie

    def adopt(self) -> None:
        self._flat.adopt(self._names)

    def zero_gradients(self) -> None:
        self._flat.zero_gradients()

    def used(self) -> Sequence[bool]:
        return self._flat.used

    def skip(self, unused: Sequence[bool], optimizer: torch.optim.Optimizer) -> None:
        forget_gradients(self.held, unused)
        if self.spans:
            self._train(skip_ranges(self.spans, self._flat.ranges(unused), optimizer))

    def divide(self, kinds: Sequence[object], optimizer: torch.optim.Optimizer) -> None:
        if self.spans:
            self._train(divide_spans(self.spans, self._flat.cuts(kinds), optimizer))

    def _train(self, spans: Sequence[FlatSpan]) -> None:
        self.spans = spans
        self.trained = [each.weights for each in spans]


class WholeSet(_FlatSet):
    """Parameters that are summed and updated completely on every rank: plain data parallelism.

    The gradients are views of one flat array, so one all_reduce sums them.
    """

    def __init__(
        self, held: Sequence[HeldParameter], mesh: TrainingMesh, precision: Precision
    ) -> None:
        """All parameters must have the same groups (`summed_over`, `held_by`), tie and type."""
        super().__init__(held, precision, parts=1)
        block = held[0].block
        self._summed_over = block.summed_over
        self._group = mesh.group(block.summed_over)
        self._replicas = replicas(held[0], mesh)
        self._has_skipped = False

    def merge(self, groups: Groups) -> Sequence[tuple[nn.Parameter, int | None]]:
        gradient = self._flat.gradient
        kinds = [groups.get(each) for each in self.trained]
        found = self._flat.spans(kinds, longest=_SPAN_ELEMENTS, end=len(gradient))
        self._train([span for span, _ in found])
        attach_gradients(self.spans, gradient)
        return [(span.weights, group) for span, group in found]

    def reduce(self) -> None:
        self._flat.collect()
        if self._has_skipped:
            attach_gradients(self.spans, self._flat.gradient)
            self._has_skipped = False
        sum_over([self._tie, self._group], self._flat.gradient, self._reduced)

    def skip(self, unused: Sequence[bool], optimizer: torch.optim.Optimizer) -> None:
        self._has_skipped = True
        super().skip(unused, optimizer)

    def squares(self) -> float:
        return sum_of_squares(self._flat.gradient) / self._replicas

    def scale(self, factor: float) -> None:
        self._flat.gradient.mul_(factor)

    def gather(self) -> None:
        """Does nothing, since every rank has updated all parameters."""

    def traffic(self, microbatches: int) -> dict[str, float]:
        groups = [("pp", self._tie), (self._summed_over, self._group)]
        return sum_traffic(groups, [(self._flat.gradient, self._reduced)])


class ShardedSet(_FlatSet):
    """Parameters that are split into equal parts, one for each rank to sum and update: ZeRO-1.

    The optimizer must update the arrays of `merge`.
    """

    def __init__(
        self, held: Sequence[HeldParameter], mesh: TrainingMesh, precision: Precision
    ) -> None:
        """All parameters must have the same groups (`summed_over`, `held_by`), tie and type."""
        block = held[0].block
        shard = shard_name(block)
        self._shard, self._group = shard, mesh.group(shard)
        ranks, rank = len(mesh.ranks(shard)), mesh.ranks(shard).index(mesh.rank)
        super().__init__(held, precision, parts=ranks)
        self._begin, self._end = self._flat.part(rank)
        self._part = self._flat.weights[self._begin : self._end]
        self._gradient = self._part.new_empty(0)
        others = [axis for axis in GROUPS[block.summed_over] if axis not in GROUPS[shard]]
        self._others = [(name, mesh.group(name)) for name in others]
        self._replicas = replicas(held[0], mesh) / ranks

    def merge(self, groups: Groups) -> Sequence[tuple[nn.Parameter, int | None]]:
        kinds = [groups.get(each) for each in self.trained]
        found = self._flat.spans(kinds, begin=self._begin, end=self._end)
        self._train([span for span, _ in found])
        return [(span.weights, group) for span, group in found]

    def reduce(self) -> None:
        self._flat.collect()
        sum_over([self._tie], self._flat.gradient, self._reduced)
        summed = self._flat.gradient.to(self._reduced)
        gradient = torch.empty_like(self._part, dtype=self._reduced)
        if self._group is None:
            gradient.copy_(summed)
        else:
            reduce_scatter_single(gradient, summed, group=self._group)
        sum_over([group for _, group in self._others], gradient, self._reduced)
        gradient = self._gradient = gradient.to(self._part.dtype)
        attach_gradients(self.spans, gradient, begin=self._begin)

    def squares(self) -> float:
        return sum_of_squares(self._gradient) / self._replicas

    def scale(self, factor: float) -> None:
        self._gradient.mul_(factor)

    def gather(self) -> None:
        for each in self.trained:
            each.grad = None
        self._gradient = self._part.new_empty(0)  # frees the sum's memory until the next step
        if self._group is not None:
            all_gather_single(self._flat.weights, self._part, group=self._group)

    def traffic(self, microbatches: int) -> dict[str, float]:
        tie, kept = self._tie, self._part.dtype
        found = sum_traffic([("pp", tie)], [(self._flat.gradient, self._reduced)])
        if self._group is not None:  # a sum and a gather of weights, each in its own type
            ranks = dist.get_world_size(self._group)
            both = self._reduced.itemsize + kept.itemsize
            found[self._shard] = (ranks - 1) * self._part.numel() * both
        return found | sum_traffic(self._others, [(self._part, self._reduced)])


def attach_gradients(spans: Sequence[FlatSpan], gradient: torch.Tensor, *, begin: int = 0) -> None:
    """Makes the gradients of spans views of an array whose first element has the index `begin`."""
    for each in spans:
        first = each.first - begin
        each.weights.grad = gradient[first : first + each.weights.numel()]


def forget_gradients(held: Sequence[HeldParameter], unused: Sequence[bool]) -> None:
    """Sets the gradients of unused parameters to None."""
    for each, is_unused in zip(held, unused, strict=True):
        if is_unused:
            each.values.grad = None


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


def make_sets(
    held: Sequence[HeldParameter], mesh: TrainingMesh, precision: Precision
) -> list[ParameterSet]:
    """Returns the sets of parameters of a layout with ZeRO stage 0 or 1, in parameter order."""
    kind: type[ShardedSet | WholeSet] = ShardedSet if mesh.layout.zero == 1 else WholeSet
    found: dict[tuple[object, ...], list[HeldParameter]] = {}
    for each in held:
        key = (each.block.summed_over, each.block.held_by, each.tie, each.values.dtype)
        found.setdefault(key, []).append(each)
    return [kind(members, mesh, precision) for members in found.values()]
