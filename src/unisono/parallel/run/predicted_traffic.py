"""The bytes that a rank sends in one step, from closed forms.

With n ranks and N bytes, a rank sends 2 (n-1)/n N bytes in a sum (all_reduce), and (n-1)/n N bytes
in a gather or a reduce_scatter. docs/parallel.md lists the closed forms of each strategy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from torch import nn

from unisono.parallel.divisible import Exchanging, MicrobatchPart
from unisono.parallel.expert_stacks import divided_experts
from unisono.parallel.layers import (
    FeedForward,
    LogitHead,
    MixtureOfExperts,
    SelfAttention,
    TensorSize,
    TokenEmbedding,
    linear_pairs,
)
from unisono.parallel.precision import Precision
from unisono.parallel.run.fully_sharded_set import gather_traffic
from unisono.parallel.run.measured_schedule import MessageBytes
from unisono.parallel.run.model_stages import stage_count, stages_of_rank
from unisono.parallel.run.parameter_sets import ParameterSet, sum_elements
from unisono.parallel.run.predicted_tensor_grid_traffic import grid_elements, grid_sums
from unisono.parallel.run.stage_messages import HEADER_BYTES
from unisono.parallel.tensor_plan import divided_modules
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import part_of

_COUNT_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchSize:
    """The size of a rank's part of a microbatch."""

    tokens: int
    """Number of tokens, before sequence parallelism splits them."""
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """The size of a step on one rank."""

    microbatches: tuple[MicrobatchSize, ...]
    item_bytes: int
    """Bytes of an element of an activation."""
    wide_bytes: int
    """Bytes of an element of a loss, of a router's scores, and of keys in a divided sequence."""
    parts: tuple[MicrobatchPart, ...]
    """Inputs and sample counts of this rank's microbatches."""
    regathers: Mapping[int, int] = field(default_factory=dict)
    """By stage: how many times a pipeline gathers weights that ZeRO-2 or ZeRO-3 split, after the
    first time in a step."""
    result_bytes: Mapping[int, MessageBytes] = field(default_factory=dict)
    """By stage of the pipeline: the sizes of the last step's results."""


def predicted_bytes(
    stages: Sequence[tuple[int, nn.Module]],
    sets: Sequence[ParameterSet],
    mesh: TrainingMesh,
    size: StepSize,
    precision: Precision,
) -> dict[str, float]:
    """Returns the bytes that this rank sends, under the group names of `TrainingMesh.bytes_sent`.

    The bytes of expert exchanges come from the routing of the last step.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for each in sets:
        for name, sent in each.traffic(len(size.microbatches)).items():
            found[mesh.counted_as(name)] += sent
    for number, stage in stages:
        for name, sent in gather_traffic(stage, mesh, precision).items():
            found[mesh.counted_as(name)] += sent * size.regathers.get(number, 0)
        if number + 1 in _neighbours(number, mesh):
            found[mesh.counted_as("pp")] += HEADER_BYTES
        for each_size in size.microbatches:
            for axis, sent in _exchanged(stage, mesh, each_size, size):
                found[mesh.counted_as(axis)] += sent
            if mesh.group("pp") is not None:
                found[mesh.counted_as("pp")] += _pipeline(number, stage, mesh, each_size, size)
        for sums, gathers in _exchanges(stage):
            sent = sum(_sum(elements, mesh, "tp") * nbytes for elements, nbytes in sums)
            sent += sum((mesh.layout.tp - 1) * elements * nbytes for elements, nbytes in gathers)
            found[mesh.counted_as("tp")] += len(size.microbatches) * sent
        if mesh.group("ep") is not None:
            found[mesh.counted_as("ep")] += _experts(stage, mesh, size)
        for experts in divided_experts(stage):
            for name, sent in experts.bytes_sent.items():
                found[mesh.counted_as(name)] += sent
        if isinstance(stage, Exchanging):
            for name, sent in stage.bytes_sent(size.parts).items():
                found[mesh.counted_as(name)] += sent
    return dict(found)


def _exchanges(stage: nn.Module) -> Iterator[tuple[Sequence[TensorSize], Sequence[TensorSize]]]:
    """Yields what a pair of linear layers, or a module that a plan divides, has summed and
    gathered in the last pass."""
    for pair in linear_pairs(stage):
        yield pair.sums or (), ()
    for divided in divided_modules(stage):
        yield divided.sums, divided.gathers


def _exchanged(
    stage: nn.Module, mesh: TrainingMesh, size: MicrobatchSize, step: StepSize
) -> Iterator[tuple[str, float]]:
    """Yields the bytes that a rank sends on `tp` and `cp` in the forward and backward pass of a
    microbatch through a stage.
    """
    if mesh.group("tp") is not None:
        yield "tp", _tensor(stage, mesh, size) * step.item_bytes
        yield "tp", _tensor_sums(stage, mesh, size) * step.wide_bytes
    if mesh.group("cp") is not None:
        yield "cp", _context(stage, mesh, size, step)


def _rest(ranks: int) -> float:
    return (ranks - 1) / ranks


def _sum(count: int, mesh: TrainingMesh, name: str) -> int:
    """Returns the elements that this rank sends to sum `count` elements over a group."""
    ranks = mesh.ranks(name)
    return sum_elements(count, ranks=len(ranks), rank=ranks.index(mesh.rank))


def _tensor(stage: nn.Module, mesh: TrainingMesh, size: MicrobatchSize) -> float:
    """Returns the elements of activations sent on `tp` in the passes of a microbatch."""
    layout, elements, hidden = mesh.layout, 0.0, _hidden(stage)
    if layout.tensor != "1d":
        return grid_elements(stage, layout, mesh.coordinates, tokens=size.tokens)
    padded = -(-mesh.sequence // layout.tp) * layout.tp * size.samples
    if layout.sequence_parallel:  # gathers and reduce_scatters, with parts of equal size
        both = 2 * _rest(layout.tp) * padded * hidden
    else:
        both = _sum(size.tokens * hidden, mesh, "tp")
    for module in stage.modules():
        if isinstance(module, SelfAttention | FeedForward):
            elements += 2 * both
        elif isinstance(module, TokenEmbedding):
            elements += both
        elif isinstance(module, MixtureOfExperts):
            if not layout.sequence_parallel:  # gathers results forward, gradients backward
                elements += 2 * _rest(layout.tp) * padded * hidden
        elif isinstance(module, LogitHead):
            elements += both
            if not module.keeps_parts:
                longest = -(-module.vocab // layout.tp)
                elements += (layout.tp - 1) * longest * size.tokens
    return elements


def _tensor_sums(stage: nn.Module, mesh: TrainingMesh, size: MicrobatchSize) -> float:
    """Returns the elements of losses, routers and norms sent on `tp` in the passes of a
    microbatch."""
    layout, elements = mesh.layout, 0.0
    if layout.tensor != "1d":
        return grid_sums(stage, layout, mesh.coordinates, tokens=size.tokens)
    padded = -(-mesh.sequence // layout.tp) * layout.tp * size.samples
    for module in stage.modules():
        if isinstance(module, MixtureOfExperts):
            elements += _sum(size.samples * module.experts, mesh, "tp")  # loads (balance loss)
            if module.capacity_factor is not None:  # gathers chosen experts
                elements += _rest(layout.tp) * padded * module.top_k
        elif isinstance(module, LogitHead) and module.keeps_parts:
            elements += 3 * _sum(size.tokens, mesh, "tp")
    return elements


def _context(stage: nn.Module, mesh: TrainingMesh, size: MicrobatchSize, step: StepSize) -> float:
    """Returns the bytes sent on `cp` in the forward and backward pass of a microbatch."""
    layout, elements, heads_moved = mesh.layout, 0.0, 0.0
    ranks, parts, tokens = layout.cp, layout.tensor_grid.column, size.tokens
    if layout.tensor != "1d":  # the grid also splits samples
        tokens //= layout.tp // parts
    for module in stage.modules():
        if isinstance(module, MixtureOfExperts):  # sum of expert loads (balance loss)
            elements += _sum(size.samples * module.experts, mesh, "cp")
            if module.capacity_factor is not None:
                elements += (ranks - 1) * tokens * module.top_k  # gather of chosen experts
        if not isinstance(module, SelfAttention):
            continue
        wide = module.heads // parts * module.head_dim * tokens
        narrow = module.kv_heads // parts * module.head_dim * tokens
        if module.context == "ring":
            elements += 2 * narrow * (2 * (ranks - 1) + ranks)
        elif module.context == "allgather":
            elements += 2 * 2 * narrow * (ranks - 1)
        else:
            kv_heads = module.kv_heads // parts
            # heads of keys and values are repeated until the ranks divide them
            copies = lcm(kv_heads, ranks) // kv_heads
            heads_moved += 2 * _rest(ranks) * 2 * (wide + copies * narrow)
    # attention to blocks of keys computes in float32, and to all positions of a head as usual
    return elements * step.wide_bytes + heads_moved * step.item_bytes


def _experts(stage: nn.Module, mesh: TrainingMesh, size: StepSize) -> float:
    """Returns the bytes sent on `ep` in the passes of a step: rows forward, gradients backward."""
    sent = 0.0
    for module in stage.modules():
        if isinstance(module, MixtureOfExperts):
            counts = _rest(mesh.layout.ep) * module.experts * _COUNT_BYTES
            rows = 2 * module.rows_moved * module.hidden * size.item_bytes
            sent += counts * len(size.microbatches) + rows
    return sent


def _neighbours(number: int, mesh: TrainingMesh) -> set[int]:
    """Returns the stages before and after a stage that other ranks hold."""
    own = stages_of_rank(mesh.layout, mesh.coordinates["pp"]) if mesh.layout.pp > 1 else [0]
    return {number - 1, number + 1} - set(own) - {-1, stage_count(mesh.layout)}


def _pipeline(
    number: int, stage: nn.Module, mesh: TrainingMesh, size: MicrobatchSize, step: StepSize
) -> float:
    """Returns the bytes sent on `pp` in the forward and backward pass of a microbatch.

    Only the values that a model computes determine the results of stages of other modules, so their
    sizes are those of the last step.
    """
    layout, neighbours = mesh.layout, _neighbours(number, mesh)
    if _hidden(stage) == 0:
        _, gradients = step.result_bytes.get(number - 1, (0, 0))
        results, _ = step.result_bytes.get(number, (0, 0))
        return gradients * (number - 1 in neighbours) + results * (number + 1 in neighbours)
    tokens, width = size.tokens / (layout.tp if layout.sequence_parallel else 1), _hidden(stage)
    if layout.tensor != "1d":
        side = layout.tensor_grid.column
        tokens /= layout.tp / side
        _, width = part_of(width, mesh.coordinates["tp_column"], side)
    return len(neighbours) * tokens * width * step.item_bytes


def _hidden(stage: nn.Module) -> int:
    """Returns the width of the activations; 0 if the modules of a stage do not determine it."""
    for module in stage.modules():
        if isinstance(module, SelfAttention):
            return module.query.in_features
        if isinstance(module, LogitHead):
            return module.projection.in_features
        if isinstance(module, TokenEmbedding):
            return module.width
    return 0
