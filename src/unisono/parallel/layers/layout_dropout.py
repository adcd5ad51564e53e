"""Dropout whose masks do not depend on the layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from unisono.parallel.counter_random import CounterRandom
from unisono.parallel.layers.grid_cuts import COLUMN, DEPTH, ROW
from unisono.parallel.layers.own_positions import own_positions
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import part_of


@dataclass(slots=True, kw_only=True)
class BatchPlace:
    """The position of a forward pass in a training run, which determines the dropout masks.

    A `ParallelRun` sets these numbers. A program that trains without one sets `step` itself.
    """

    step: int = 0
    """Number of the step, from 0."""
    first_sample: int = 0
    """Index of the first sample of this rank's forward pass, counted in the whole batch."""


class LayoutDropout(nn.Module):
    """Sets each element of its input to zero with probability `drop`, and scales other elements.

    Input and output have the shape (samples, sequence, width). The mask of an element depends on
    the seed, the site, the step, and the element's sample, position and feature. So the ranks of
    any layout draw the masks that a single process draws. Does nothing after `eval()`.

    >>> dropout = LayoutDropout(0.5, seed=0, site="example")
    >>> x = torch.ones(4, 3, 2)
    >>> dropout.place.first_sample = 2
    >>> half = dropout(x[2:])
    >>> dropout.place.first_sample = 0
    >>> torch.equal(dropout(x)[2:], half)
    True
    """

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
        if self.drop == 0 or not self.training:
            return x
        return x * (self._mask(x).to(x.dtype) / (1 - self.drop))

    def _mask(self, x: torch.Tensor) -> torch.Tensor:
        samples, count, _ = x.shape
        first, (feature, width) = self.place.first_sample, self._features(x)
        length, runs = count, [(0, count)]
        if self._mesh is not None:
            layout = self._mesh.layout
            length = self._mesh.sequence * layout.cp
            divided = layout.sequence_parallel
            runs = _runs(own_positions(self._mesh, length=length, is_divided=divided))
            first += self._samples_before(samples)
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
