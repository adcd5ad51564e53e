"""The part of a batch that a rank trains on, as microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.parallel.context import zigzag_part
from unisono.parallel.positions import sequence_length
from unisono.parallel.run.batch.batch_tree import BatchTree
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Layout

Span = tuple[int, int]
"""The first element and the number of elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """A rank's part of a microbatch."""

    inputs: Any
    """Arguments of the model: the inputs of `step(inputs, targets)`, or a part of the batch.
    Has at least one sample, which does not count if the rank has none: many modules do not accept
    arrays without elements."""
    targets: Any
    """Argument of the loss after the output: the targets, or the same part of the batch."""
    passed: int
    """Number of samples in `inputs`."""
    own: int
    """Number of samples that count; 0 if this rank has none."""
    first_sample: int
    """The index of the rank's first sample, counted in the whole batch."""
    samples: int
    """Number of samples of the microbatch, over all ranks of `dp`."""
    share: float
    """The rank's part of the samples and positions of the whole batch, as a fraction."""
    positions: int
    """Number of positions of a sample of the targets on this rank; 1 without positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPart:
    """The microbatches of one rank."""

    microbatches: tuple[Microbatch, ...]
    samples: int
    """Number of samples of the whole batch."""
    sequence: int
    """Number of positions of a sample's inputs on this rank; 0 without positions."""


def divide_batch(
    batch: BatchTree,
    mesh: TrainingMesh,
    microbatches: int,
    *,
    is_pair: bool,
    counts: Sequence[int] | None = None,
    keeps_sequences: bool = False,
    needs_targets: bool = True,
) -> BatchPart:
    """Returns this rank's part of a batch.

    The batch is cut into microbatches. The ranks of `dp` divide each microbatch, and the ranks of
    `cp` divide each sequence. So a microbatch holds the same samples in every layout. Parts may be
    uneven, but not in a pipeline. `is_pair`: the batch is (inputs, targets). `counts`: the samples
    of each rank of `dp`, if `batch` is this rank's part already. `keeps_sequences`: the inputs have
    all positions; the targets do not, and are left whole only without `needs_targets`.

    Raises `ValueError` for sizes that cannot be divided.
    """
    layout, place = mesh.layout, data_parallel_rank(mesh)
    _check_sizes(batch, layout, microbatches, is_local=counts is not None)
    whole = batch.samples if counts is None else sum(counts)
    before = 0 if counts is None else sum(counts[:place])
    own, every = _spans(batch.samples, microbatches, place, layout.dp, counts)
    if keeps_sequences:
        tensors: Sequence[torch.Tensor] = batch.tensors
        divided_length(tensors[:1] if is_pair else tensors, mesh)
        targets_of = _own_positions(batch, mesh) if needs_targets else tensors
    else:
        targets_of = tensors = batch.tensors if layout.cp == 1 else _own_positions(batch, mesh)
    found, positions = [], targets_of[-1 if is_pair else 0].shape[1:].numel()
    for (first, count), samples in zip(own, every, strict=True):
        parts = [_rows(each, first, count) for each in tensors]
        others = parts
        if targets_of is not tensors:
            others = [_rows(each, first, count) for each in targets_of]
        if is_pair:
            inputs, targets = parts[0], others[1] if count else others[1][:0]
        else:
            inputs = batch.with_tensors(parts)
            targets = inputs if others is parts else batch.with_tensors(others)
        found.append(
            Microbatch(
                inputs=inputs,
                targets=targets,
                passed=len(parts[0]),
                own=count,
                first_sample=before + first,
                samples=samples,
                share=count / whole / layout.cp if whole else 0.0,
                positions=positions,
            )
        )
    first_tensor = targets_of[0]
    return BatchPart(
        microbatches=tuple(found),
        samples=whole,
        sequence=first_tensor.shape[1] if first_tensor.dim() > 1 else 0,
    )


def _spans(
    samples: int, microbatches: int, place: int, dp: int, counts: Sequence[int] | None
) -> tuple[list[Span], list[int]]:
    """Returns the samples of this rank in each microbatch, and the samples of each microbatch.

    Each rank has the whole batch, or a part of `counts` samples for each rank of `dp`. This rank's
    number along `dp` is `place`.
    """
    numbers = range(microbatches)
    own = [_even_part(samples, number, microbatches) for number in numbers]
    if counts is not None:
        parts = [
            [_even_part(each, number, microbatches)[1] for each in counts] for number in numbers
        ]
        return own, [*map(sum, parts)]
    inside = [_even_part(count, place, dp) for _, count in own]
    pairs = zip(own, inside, strict=True)
    return [(first + begin, size) for (first, _), (begin, size) in pairs], [c for _, c in own]


def data_parallel_rank(mesh: TrainingMesh) -> int:
    """Returns the number of this rank along `dp`."""
    place = mesh.coordinates["dp_replicate"] * mesh.grid.sizes["dp_shard"]
    return place + mesh.coordinates["dp_shard"]


def _rows(x: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Returns some samples; in place of none, one sample that does not count."""
    if count:
        return x[first : first + count]
    return x[:1] if len(x) else x.new_zeros(1, *x.shape[1:])


def _check_sizes(batch: BatchTree, layout: Layout, microbatches: int, *, is_local: bool) -> None:
    """Raises `ValueError` for a batch that the layout cannot divide."""
    samples = batch.samples
    if samples == 0 and not is_local:
        name = batch.names[0] or "batch"
        raise ValueError(f"a batch needs at least one sample, got {name} of length 0")
    parts = microbatches * (1 if is_local else layout.dp)
    text = f"{microbatches}" if is_local else f"{microbatches} x {layout.dp} = {parts}"
    what = "microbatches" if is_local else "microbatches x dp"
    if layout.pp > 1 and (samples % parts or samples == 0):
        near = _nearest_multiple(samples, parts)
        raise ValueError(
            f"a pipeline needs a multiple of {what} = {text} samples, not {samples}; {near} is"
        )
    grid = layout.tensor_grid
    multiple = grid.depth * grid.row * parts
    if layout.tensor != "1d" and samples % multiple:
        near = _nearest_multiple(samples, multiple)
        raise ValueError(
            f"tensor = {layout.tensor} divides samples: expected a multiple of {what} x "
            f"depth x rows = {text.partition(' =')[0]} x {grid.depth} x {grid.row} = {multiple}, "
            f"got {samples}; {near} works"
        )


def _even_part(length: int, part: int, parts: int) -> Span:
    """Returns the first element and the length of a part. The first parts may have one element
    more than the others, as in torch's `tensor_split`.
    """
    short, longer = divmod(length, parts)
    return part * short + min(part, longer), short + (part < longer)


def _nearest_multiple(count: int, factor: int) -> int:
    return max(round(count / factor), 1) * factor


def divided_length(inputs: Sequence[torch.Tensor], mesh: TrainingMesh) -> int:
    """Returns the number of positions of sequences that the ranks of `cp` divide.

    Raises `ValueError` for inputs without such sequences.
    """
    length, layout = sequence_length(inputs), mesh.layout
    cure = f"dp = {layout.dp * layout.cp} without cp works"
    if length is None:
        raise ValueError(
            f"cp = {layout.cp} divides dimension 1 of tokens (samples, positions) or vectors "
            f"(samples, positions, ...), but the batch has none; {cure}"
        )
    try:
        zigzag_part(length, mesh.coordinates["cp"], layout.cp)
    except ValueError as error:
        shape = next(tuple(each.shape) for each in inputs if each.shape[1:2] == (length,))
        raise ValueError(
            f"{error}; cp = {layout.cp} takes dimension 1 of {shape} for positions; {cure}"
        ) from None
    return length


def _own_positions(batch: BatchTree, mesh: TrainingMesh) -> list[torch.Tensor]:
    """Returns the tensors of a batch with the positions that this rank of `cp` holds.

    Raises `ValueError` for tensors without positions. A tensor of floats with two dimensions has
    positions only if others have as many.
    """
    pairs = list(zip(batch.names, batch.tensors, strict=True))
    lengths = [
        each.shape[1]
        for _, each in pairs
        if each.dim() > 2 or (each.dim() == 2 and not each.is_floating_point())
    ]
    found = []
    for name, each in pairs:
        where = name or "batch"
        if each.dim() < 2 or not lengths:
            raise ValueError(
                f"{where}: cp divides dimension 1 of each tensor, the positions: expected tokens "
                "(samples, positions) or vectors (samples, positions, ...), got "
                f"{each.dtype} of shape {tuple(each.shape)}; dp = {mesh.layout.dp * mesh.layout.cp}"
                " without cp works"
            )
        if each.shape[1] != lengths[0]:
            raise ValueError(
                f"{where}: cp divides the positions in dimension 1: expected {lengths[0]}, as other"
                f" tensors of the batch have, got {each.shape[1]}"
            )
        positions = zigzag_part(each.shape[1], mesh.coordinates["cp"], mesh.layout.cp)
        found.append(each[:, positions])
    return found
