"""Sets of parameters whose weights and gradients are views of flat arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.data_parallelism.flat_parameters import FlatParameters, FlatSpan
from unisono.parallel.divisible.parameter_block import ParameterBlock
from unisono.parallel.precision import Precision
from unisono.parallel.rank_grid import GROUPS
from unisono.parallel.run.parameters.optimizers import Optimizers
from unisono.parallel.run.parameters.parameter_sets import (
    BucketGradient,
    GradientBucket,
    Groups,
    HeldParameter,
    ParameterSet,
    attach_gradients,
    replicas,
    shard_name,
    sum_of_squares,
    sum_over,
    sum_traffic,
)
from unisono.parallel.training_mesh import TrainingMesh
from unisono.torch_backend import all_gather_single, reduce_scatter_single


def divide_spans(
    spans: Sequence[FlatSpan], cuts: Iterable[int], optimizers: Optimizers
) -> list[FlatSpan]:
    """Cuts spans at elements of their flat array, and gives the optimizer the parts.

    A part takes its elements of the span's gradient and states. Scalar states are copied, so that
    the parts can count different numbers of steps. Returns all spans in order.
    """
    edges = sorted(set(cuts))
    found: list[FlatSpan] = []
    for span in spans:
        inside = [each - span.first for each in edges if span.first < each < span.end]
        found += _divide(span, inside, optimizers) if inside else [span]
    return found


def _divide(span: FlatSpan, cuts: Sequence[int], optimizers: Optimizers) -> list[FlatSpan]:
    whole, parts = span.weights, []
    owner = optimizers.owner(whole)
    states = None if owner is None else owner.state.pop(whole, None)

    def part_of(state: Any) -> Any:
        if not isinstance(state, torch.Tensor):
            return state
        return state.clone() if state.dim() == 0 else state[begin:end]

    for begin, end in pairwise([0, *cuts, whole.numel()]):
        part = nn.Parameter(whole.detach()[begin:end])
        part.grad = None if whole.grad is None else whole.grad[begin:end]
        if owner is not None and states is not None:
            owner.state[part] = {name: part_of(state) for name, state in states.items()}
        parts.append(FlatSpan(span.first + begin, part))
    for group in optimizers.groups:
        group["params"] = [
            piece
            for each in group["params"]
            for piece in ([part.weights for part in parts] if each is whole else [each])
        ]
    return parts


_SPAN_ELEMENTS = 2**18  # longer spans leave the cache between the operations of an optimizer
_BUCKET_BYTES = 2**22
"""The thread of a sum waits several times for a core that a backward pass uses. In this time a link
is idle, so smaller buckets would lose more of it; larger buckets would begin later."""
_MOST_BUCKETS = 64


class _FlatSet(ParameterSet):
    """Parameters whose weights and gradients are views of two flat arrays."""

    def __init__(
        self,
        held: Sequence[HeldParameter],
        mesh: TrainingMesh,
        precision: Precision,
        *,
        ranks: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`ranks`: the number of equal parts of each bucket. `group`: that of their sums."""
        super().__init__(held)
        self._reduced = precision.reduced(held[0].values.dtype)
        self._names = [each.name for each in held]
        overlaps, nbytes = sums_overlap(held[0], mesh), sum(each.values.nbytes for each in held)
        count = max(1, min(_MOST_BUCKETS, nbytes // _BUCKET_BYTES)) if overlaps else 1
        self._flat = FlatParameters(self.trained, parts=ranks * count, group=group)
        self._tie = held[0].tie
        self._length = ranks * self._flat.part_length
        """The number of elements of each bucket."""
        self._in_buckets = torch.split(self._flat.gradient, self._length)
        """The flat array of gradients, by bucket."""
        self._gradients = [
            BucketGradient(held=each, version=partial(self._flat.gradient_version, number))
            for number, each in enumerate(held)
        ]
        self._every = [self._bucket(number) for number in range(count)]
        self._bounds: Sequence[tuple[int, int]] = ()
        """The first and the last element, plus 1, of each part that this rank updates."""
        self._longest: int | None = None
        """The most elements of an array with several parameters."""
        self.buckets = self._every if overlaps else ()

    def _bucket(self, number: int) -> GradientBucket:
        begin, end = number * self._length, (number + 1) * self._length
        inside = self._flat.in_range(begin, end)
        return GradientBucket(
            name=f"{self._names[0]} {self._flat.gradient.dtype} {number}",
            nbytes=self._length * self._flat.gradient.element_size(),
            gradients=[self._gradients[each] for each in inside],
            collect=partial(self._flat.collect_some, inside),
            sum=partial(self._sum, number),
        )

    def merge(self, groups: Groups) -> Sequence[tuple[nn.Parameter, int | None]]:
        kinds = [groups.get(each) for each in self.trained]
        found = [
            pair
            for begin, end in self._bounds
            for pair in self._flat.spans(kinds, longest=self._longest, begin=begin, end=end)
        ]
        self._train([span for span, _ in found])
        return [(span.weights, group) for span, group in found]

    @abstractmethod
    def _sum(self, number: int) -> None:
        """Sums the gradients in a bucket. Collective."""

    def adopt(self) -> None:
        self._flat.adopt(self._names)

    def zero_gradients(self) -> None:
        self._flat.zero_gradients()

    def reduce(self) -> None:
        self.collect()
        for each in self._every:
            each.sum()

    def collect(self) -> None:
        self._flat.collect()

    def used(self) -> Sequence[bool]:
        return self._flat.used

    def skip(self, unused: Sequence[bool], optimizers: Optimizers) -> None:
        super().skip(unused, optimizers)
        if self.spans:
            ranges = self._flat.ranges(unused)
            edges = (edge for each in ranges for edge in each)
            self._train(divide_spans(self.spans, edges, optimizers))
            for span in self.spans:
                if any(begin <= span.first < end for begin, end in ranges):
                    span.weights.grad = None

    def divide(self, kinds: Sequence[object], optimizers: Optimizers) -> None:
        if self.spans:
            self._train(divide_spans(self.spans, self._flat.cuts(kinds), optimizers))

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
        self._summed_over = held[0].block.summed_over
        self._group = mesh.sum_group(self._summed_over)
        super().__init__(held, mesh, precision, ranks=1, group=self._group)
        self._replicas = replicas(held[0], mesh)
        self._bounds, self._longest = [(0, len(self._flat.gradient))], _SPAN_ELEMENTS
        self._has_skipped = False

    def merge(self, groups: Groups) -> Sequence[tuple[nn.Parameter, int | None]]:
        found = super().merge(groups)
        attach_gradients(self.spans, self._flat.gradient)
        return found

    def collect(self) -> None:
        super().collect()
        if self._has_skipped:
            attach_gradients(self.spans, self._flat.gradient)
            self._has_skipped = False

    def _sum(self, number: int) -> None:
        sum_over([self._tie, self._group], self._in_buckets[number], self._reduced)

    def skip(self, unused: Sequence[bool], optimizers: Optimizers) -> None:
        self._has_skipped = True
        super().skip(unused, optimizers)

    def squares(self) -> float:
        return sum_of_squares(self._flat.gradient) / self._replicas

    def scale(self, factor: float) -> None:
        self._flat.gradient.mul_(factor)

    def traffic(self, microbatches: int) -> dict[str, float]:
        groups = [("pp", self._tie), (self._summed_over, self._group)]
        return sum_traffic(groups, [(each, self._reduced) for each in self._in_buckets])


class ShardedSet(_FlatSet):
    """Parameters that are split into equal parts, one for each rank to sum and update: ZeRO-1.

    Each bucket is split by itself. The optimizer must update the arrays of `merge`.
    """

    def __init__(
        self, held: Sequence[HeldParameter], mesh: TrainingMesh, precision: Precision
    ) -> None:
        block = held[0].block
        shard = shard_name(block)
        self._shard, self._group = shard, mesh.sum_group(shard)
        self._ranks, rank = len(mesh.ranks(shard)), mesh.ranks(shard).index(mesh.rank)
        super().__init__(held, mesh, precision, ranks=self._ranks, group=self._group)
        self._bounds = [
            self._flat.part(number * self._ranks + rank) for number in range(len(self._every))
        ]
        self._wholes = torch.split(self._flat.weights, self._length)
        """The flat array of weights, by bucket."""
        self._parts = [self._flat.weights[begin:end] for begin, end in self._bounds]
        self._empty = self._flat.weights.new_empty(0)
        self._sums = [self._empty] * len(self._parts)
        """The sums of this rank's parts."""
        self._others = [(name, mesh.sum_group(name)) for name in _further_axes(block)]
        self._replicas = replicas(held[0], mesh) / self._ranks

    def _sum(self, number: int) -> None:
        whole = self._in_buckets[number]
        sum_over([self._tie], whole, self._reduced)
        summed = whole.to(self._reduced)
        gradient = summed.new_empty(self._flat.part_length)
        if self._group is None:
            gradient.copy_(summed)
        else:
            reduce_scatter_single(gradient, summed, group=self._group)
        sum_over([group for _, group in self._others], gradient, self._reduced)
        gradient = self._sums[number] = gradient.to(whole.dtype)
        begin, end = self._bounds[number]
        inside = [each for each in self.spans if begin <= each.first < end]
        attach_gradients(inside, gradient, begin=begin)

    def squares(self) -> float:
        return sum(map(sum_of_squares, self._sums), 0.0) / self._replicas

    def scale(self, factor: float) -> None:
        for gradient in self._sums:
            gradient.mul_(factor)

    def gather(self) -> None:
        for each in self.trained:
            each.grad = None
        # frees the memory of the sums until the next step
        self._sums = [self._empty] * len(self._parts)
        if self._group is not None:
            for whole, part in zip(self._wholes, self._parts, strict=True):
                all_gather_single(whole, part, group=self._group)

    def traffic(self, microbatches: int) -> dict[str, float]:
        kept, tie = self._flat.weights.dtype, ("pp", self._tie)
        found = sum_traffic([tie], [(each, self._reduced) for each in self._in_buckets])
        if self._group is not None:  # a sum and a gather of weights, each in its own type
            ranks = dist.get_world_size(self._group)
            both = self._reduced.itemsize + kept.itemsize
            found[self._shard] = (ranks - 1) * sum(each.numel() for each in self._parts) * both
        return found | sum_traffic(self._others, [(each, self._reduced) for each in self._parts])


def sums_overlap(held: HeldParameter, mesh: TrainingMesh) -> bool:
    """Returns True if the gradient of a parameter is summed while passes run.

    A parameter of several pipeline stages is summed after the passes: its gradient is complete with
    that of the first stage, and the pipeline's messages may use the group of its stages.
    """
    return held.tie is None and any(map(mesh.overlaps, sum_names(held, mesh)))


def sum_names(held: HeldParameter, mesh: TrainingMesh) -> list[str]:
    """Returns the names of the groups that sum the gradient of a parameter, one after the other."""
    block = held.block
    if mesh.layout.zero == 1:
        return [shard_name(block), *_further_axes(block)]
    return [block.summed_over]


def _further_axes(block: ParameterBlock) -> list[str]:
    """Returns the axes over which a part that ZeRO-1 has summed is summed further."""
    done = GROUPS[shard_name(block)]
    return [axis for axis in GROUPS[block.summed_over] if axis not in done]
