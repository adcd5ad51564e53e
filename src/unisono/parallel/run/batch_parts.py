"""The part of a global batch that a rank trains on, as microbatches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.parallel.context import zigzag_part
from unisono.parallel.divisible import MicrobatchPart
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPart:
    """The microbatches of one rank."""

    inputs: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    """Has no elements for a microbatch of which this rank has no samples. The inputs then have one
    sample, which does not count: many modules do not accept arrays without elements."""
    samples: tuple[int, ...]
    """Number of samples of each microbatch, over all ranks of `dp`."""
    first_samples: tuple[int, ...]
    """For each microbatch, the index of this rank's first sample, counted in the whole batch."""

    def microbatches(self) -> tuple[MicrobatchPart, ...]:
        """Returns this rank's inputs of each microbatch, with the microbatch's sample count."""
        pairs = zip(self.inputs, self.samples, strict=True)
        return tuple(MicrobatchPart(inputs=inputs, samples=count) for inputs, count in pairs)


def divide_batch(
    inputs: torch.Tensor, targets: torch.Tensor, mesh: TrainingMesh, microbatches: int
) -> BatchPart:
    """Returns this rank's part of a batch that all ranks hold.

    The batch is cut into microbatches. The ranks of `dp` divide each microbatch, and the ranks of
    `cp` divide each sequence. So a microbatch holds the same samples in every layout. Parts may be
    uneven, but not in a pipeline.

    Raises `ValueError` for sizes that cannot be divided.
    """
    layout = mesh.layout
    _check_sizes(inputs, targets, layout, microbatches)
    place = mesh.coordinates["dp_replicate"] * mesh.grid.sizes["dp_shard"]
    place += mesh.coordinates["dp_shard"]
    spans = [_even_part(len(inputs), number, microbatches) for number in range(microbatches)]
    own = spans
    if layout.dp > 1:
        parts = [_even_part(count, place, layout.dp) for _, count in spans]
        own = [
            (first + begin, size) for (first, _), (begin, size) in zip(spans, parts, strict=True)
        ]

    def cut(x: torch.Tensor, *, least: int) -> tuple[torch.Tensor, ...]:
        # with `least` = 1, an empty part gets the first sample of the batch
        parts = tuple(x[first : first + count] if count else x[:least] for first, count in own)
        return parts if layout.cp == 1 else tuple(_own_positions(part, mesh) for part in parts)

    return BatchPart(
        inputs=cut(inputs, least=1),
        targets=cut(targets, least=0),
        samples=tuple(count for _, count in spans),
        first_samples=tuple(first for first, _ in own),
    )


def _check_sizes(
    inputs: torch.Tensor, targets: torch.Tensor, layout: Layout, microbatches: int
) -> None:
    """Raises `ValueError` for a batch that the layout cannot divide."""
    if len(inputs) != len(targets):
        raise ValueError(
            f"expected as many targets as inputs, got {len(targets)} for {len(inputs)} inputs"
        )
    if len(inputs) == 0:
        raise ValueError("a batch needs at least one sample, got inputs of length 0")
    if layout.cp > 1 and inputs.dim() < 3 and inputs.is_floating_point():
        raise ValueError(
            "cp divides dimension 1 of the inputs, the positions: expected tokens (samples, "
            f"positions) or vectors (samples, positions, ...), got {inputs.dtype} of shape "
            f"{tuple(inputs.shape)}; dp = {layout.dp * layout.cp} without cp works"
        )
    parts = microbatches * layout.dp
    if layout.pp > 1 and len(inputs) % parts:
        near = _nearest_multiple(len(inputs), parts)
        raise ValueError(
            f"a pipeline needs a multiple of microbatches x dp = {microbatches} x {layout.dp} = "
            f"{parts} samples, not {len(inputs)}; {near} is"
        )
    grid = layout.tensor_grid
    samples = grid.depth * grid.row * parts
    if layout.tensor != "1d" and len(inputs) % samples:
        near = _nearest_multiple(len(inputs), samples)
        raise ValueError(
            f"tensor = {layout.tensor} divides samples: expected a multiple of microbatches x dp x "
            f"depth x rows = {microbatches} x {layout.dp} x {grid.depth} x {grid.row} = {samples}, "
            f"got {len(inputs)}; {near} works"
        )


def _even_part(length: int, part: int, parts: int) -> tuple[int, int]:
    """Returns the first element and the length of a part. The first parts may have one element
    more than the others, as in torch's `tensor_split`.
    """
    short, longer = divmod(length, parts)
    return part * short + min(part, longer), short + (part < longer)


def _nearest_multiple(count: int, factor: int) -> int:
    return max(round(count / factor), 1) * factor


def _own_positions(x: torch.Tensor, mesh: TrainingMesh) -> torch.Tensor:
    """Returns the positions of x (samples, sequence, ...) that this rank of `cp` holds."""
    if x.dim() < 2:
        raise ValueError(
            f"cp divides sequences: expected (samples, sequence), got {tuple(x.shape)}"
        )
    return x[:, zigzag_part(x.shape[1], mesh.coordinates["cp"], mesh.layout.cp)]
