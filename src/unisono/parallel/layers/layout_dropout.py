"""Dropout whose masks do not depend on the layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from unisono.parallel.counter_random import CounterRandom
from unisono.parallel.layers.own_positions import own_positions
from unisono.parallel.training_mesh import TrainingMesh


@dataclass(slots=True, kw_only=True)
class BatchPlace:
    """The place of a forward pass in a training run, from which dropout masks follow.

    `parallelize` keeps it. A program that trains without it sets `step` itself.
    """

    step: int = 0
    """Number of the step."""
    first_sample: int = 0
    """Number, in the whole batch, of the first sample of the pass on this rank."""


class LayoutDropout(nn.Module):
    """Sets each element of its input to zero with probability `drop`, and scales the others.

    Shape (samples, sequence, width) in and out. The mask of an element follows from the seed, the
    site, the step, and the element's sample, position and feature. So the ranks of any layout draw
    the masks of one process. Does nothing after `eval()`.

    >>> dropout = LayoutDropout(0.5, seed=0, site="example")
    >>> x = torch.ones(4, 3, 2)
    >>> dropout.place.first_sample = 2
    >>> half = dropout(x[2:])
    >>> dropout.place.first_sample = 0
    >>> torch.equal(dropout(x)[2:], half)
    True
    """

    def __init__(self, drop: float, *, seed: int, site: str) -> None:
        """`site`: names this place of the model. Raises `ValueError` for no probability."""
        super().__init__()
        if not 0 <= drop < 1:
            raise ValueError(f"dropout: expected a probability from 0 to below 1, got {drop}")
        self.drop = drop
        self.place = BatchPlace()
        """The place of the next forward pass; modules of one model share it."""
        self._random, self._site = CounterRandom(seed), site
        self._mesh: TrainingMesh | None = None

    def divide(self, mesh: TrainingMesh) -> None:
        """Draws masks for this rank's elements. Raises `ValueError` for 2D to 3D layouts."""
        if self.drop > 0 and mesh.layout.tensor != "1d":
            raise ValueError(
                f"dropout is not built for tensor = {mesh.layout.tensor}; tensor = 1d works, and "
                "dropout = 0"
            )
        self._mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.drop == 0 or not self.training:
            return x
        return x * (self._mask(x).to(x.dtype) / (1 - self.drop))

    def _mask(self, x: torch.Tensor) -> torch.Tensor:
        samples, count, width = x.shape
        length, runs = count, [(0, count)]
        if self._mesh is not None:
            layout = self._mesh.layout
            length = self._mesh.sequence * layout.cp
            divided = layout.sequence_parallel
            runs = _runs(own_positions(self._mesh, length=length, is_divided=divided))
        first = self.place.first_sample
        return torch.cat(
            [
                self._random.keep_mask(
                    self._site,
                    (first + samples, length, width),
                    drop=self.drop,
                    step=self.place.step,
                    start=(first, begin, 0),
                    sizes=(samples, count, width),
                )
                for begin, count in runs
            ],
            dim=1,
        )


def _runs(positions: torch.Tensor) -> list[tuple[int, int]]:
    """Returns the runs of successive positions: begin and count. One empty run for none."""
    found: list[tuple[int, int]] = []
    for position in positions.tolist():
        if found and sum(found[-1]) == position:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((position, 1))
    return found or [(0, 0)]
