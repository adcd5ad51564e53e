"""Dropout whose masks do not depend on the layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from unisono.division import part_of
from unisono.parallel.context.zigzag import own_positions
from unisono.parallel.counter_random import CounterRandom
from unisono.parallel.divisible.interfaces import ALL_ACTIVATIONS
from unisono.parallel.layers.tensor_grid import COLUMN, DEPTH, ROW
from unisono.parallel.training_mesh import TrainingMesh


@dataclass(slots=True, kw_only=True)
class BatchPlace:
    """The position of a forward pass in a training run, which determines the dropout masks.

    A `ParallelRun` sets these numbers. A program that trains without one sets `step` itself.
    """

    step: int = 0
    """Number of the step, from 0."""
    first_sample: int = 0
    """Index of the first sample of this rank's forward pass, counted in the whole batch."""
    samples: int | None = None
    """Number of samples of the forward pass, before tensor parallelism divides them; None if it is
    not known."""


class LayoutDropout(nn.Module):
    """Sets each element of its input to zero with probability `drop`, and scales other elements.

    Input and output have the shape (samples, ..., width), for example (samples, sequence, width).
    The mask of an element depends on the seed, the site, the step, and the element's place in its
    sample. So the ranks of any layout draw the masks that a single process draws. Does nothing
    after `eval()`.

    >>> dropout = LayoutDropout(0.5, seed=0, site="example")
    >>> x = torch.ones(4, 3, 2)
    >>> dropout.place.first_sample = 2
    >>> half = dropout(x[2:])
    >>> dropout.place.first_sample = 0
    >>> torch.equal(dropout(x)[2:], half)
    True
    """

    serves = ALL_ACTIVATIONS

    def __init__(self, drop: float, *, seed: int, site: str, width: int | None = None) -> None:
        """`site`: name of this dropout in the model. Raises `ValueError` for a wrong `drop`.

        `width`: number of features of the whole input, which `divide` needs for tensor parallelism
        in 2D, 2.5D and 3D.
        """
        super().__init__()
        if not 0 <= drop < 1:
            raise ValueError(f"dropout: expected a probability from 0 to below 1, got {drop}")
        self.drop = drop
        self.place = BatchPlace()
        """The position of the next forward pass, which all dropout modules of a model share."""
        self._random, self._site, self._width = CounterRandom(seed), site, width
        self._mesh: TrainingMesh | None = None

    def divide(self, mesh: TrainingMesh) -> None:
        """Makes later masks cover this rank's elements only.

        Raises `ValueError` for tensor parallelism that divides an unknown width.
        """
        if self.drop > 0 and self._width is None and mesh.layout.tensor != "1d":
            raise ValueError(
                f"dropout: tensor = {mesh.layout.tensor} divides the width of activations; expected"
                " LayoutDropout(width=...), got no width"
            )
        self._mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises `ValueError` for an array without the dimensions of samples and features, and for
        one with other samples or positions than this rank's."""
        if self.drop == 0 or not self.training:
            return x
        if x.dim() < 2:
            raise ValueError(
                f"LayoutDropout: expected (samples, ..., width), got {tuple(x.shape)}; call it on "
                "activations that have the dimension of samples"
            )
        places = x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])
        return x * (self._mask(places).view_as(x).to(x.dtype) / (1 - self.drop))

    def _mask(self, x: torch.Tensor) -> torch.Tensor:
        samples, count, _ = x.shape
        first, (feature, width) = self.place.first_sample, self._features(x)
        length, runs = count, [(0, count)]
        if self._mesh is not None:
            length, runs = self._positions(self._mesh, count)
            first += self._samples_before(samples)
        self._check_samples(samples)
        return torch.cat(
            [
                self._random.keep_mask(
                    self._site,
                    (first + samples, length, width),
                    drop=self.drop,
                    step=self.place.step,
                    start=(first, begin, feature),
                    sizes=(samples, count, x.shape[-1]),
                )
                for begin, count in runs
            ],
            dim=1,
        )

    def _positions(self, mesh: TrainingMesh, count: int) -> tuple[int, list[tuple[int, int]]]:
        """Returns the number of positions of a whole sample, and the runs that this rank has."""
        layout = mesh.layout
        is_divided = layout.sequence_parallel and layout.tp > 1
        if layout.cp == 1 and not is_divided:
            return count, [(0, count)]
        length = mesh.sequence * layout.cp
        runs = _runs(own_positions(mesh, length=length, is_divided=is_divided))
        own = sum(size for _, size in runs)
        if own != count:
            axis = "cp" if layout.cp > 1 else "sequence_parallel"
            raise ValueError(
                f"LayoutDropout: {axis} divides the positions of the inputs, of which this rank has"
                f" {own}; expected as many positions, got {count}; use it where the activations are"
                f" (samples, positions, width) with the positions of the inputs, or no {axis}"
            )
        return length, runs

    def _check_samples(self, samples: int) -> None:
        """Raises `ValueError` for activations whose first dimension is not that of the samples."""
        parts = 1
        if self._mesh is not None and self._mesh.layout.tensor != "1d":
            parts = self._mesh.layout.tensor_grid.depth * self._mesh.layout.tensor_grid.row
        known = self.place.samples
        if known is not None and samples * parts != known:
            raise ValueError(
                f"LayoutDropout: expected the {known // parts} samples of this pass in dimension 0,"
                f" got {samples}; use it where dimension 0 is that of the samples"
            )

    def _features(self, x: torch.Tensor) -> tuple[int, int]:
        """Returns the first feature of this rank's part x, and the number of all features."""
        if self._mesh is None or self._mesh.layout.tensor == "1d" or self._width is None:
            return 0, x.shape[-1]
        grid, place = self._mesh.layout.tensor_grid, self._mesh.coordinates
        return part_of(self._width, place[COLUMN], grid.column)[0], self._width

    def _samples_before(self, samples: int) -> int:
        """Returns the number of samples on the ranks of the grid of `tp` that precede this rank.

        Between layers, depth and rows of the grid divide the samples of a microbatch, into equal
        parts of `samples` samples.
        """
        assert self._mesh is not None
        if self._mesh.layout.tensor == "1d":
            return 0
        grid, place = self._mesh.layout.tensor_grid, self._mesh.coordinates
        return (place[DEPTH] * grid.row + place[ROW]) * samples


def _runs(positions: torch.Tensor) -> list[tuple[int, int]]:
    """Returns (begin, count) of each run of consecutive positions; (0, 0) if there are none."""
    found: list[tuple[int, int]] = []
    for position in positions.tolist():
        if found and sum(found[-1]) == position:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((position, 1))
    return found or [(0, 0)]
