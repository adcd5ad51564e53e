"""The grid of ranks over which tensor parallelism divides matrices: a line, a plane or a cube; and
the elements that its ranks send.

The planner predicts lines only, because no published run uses another grid.

2D: van de Geijn and Watts, "SUMMA", 1997, and Xu et al., "Optimus", 2021. 2.5D: Wang et al.,
"Tesseract", 2021. 3D: Agarwal et al., 1995, and Bian et al., "Maximizing parallelism in distributed
training for huge neural networks", 2021.
"""

from __future__ import annotations

import math
from typing import NamedTuple

TENSOR_KINDS = ("1d", "2d", "2.5d", "3d")
"""Kinds of tensor parallelism. 1d divides each matrix along one dimension."""


class TensorGrid(NamedTuple):
    """Number of `tp` ranks along each dimension of the grid. Consecutive ranks differ first in the
    column index.
    """

    depth: int
    row: int
    column: int

    @classmethod
    def of(cls, kind: str, tp: int) -> TensorGrid:
        """Returns the grid of a kind of tensor parallelism.

        The grid of 2.5d is d x q x q with the largest possible q. If this gives d = 1, the grid
        equals that of 2d. Raises `ValueError` for another kind, and for a `tp` that makes no such
        grid.

        >>> TensorGrid.of("2.5d", 8)
        TensorGrid(depth=2, row=2, column=2)
        >>> TensorGrid.of("2d", 6)
        Traceback (most recent call last):
        ValueError: tensor = 2d needs tp = q x q: 6 is not; 4 is
        """
        if kind == "1d":
            return cls(1, 1, tp)
        if kind not in TENSOR_KINDS:
            raise ValueError(f"tensor must be one of {', '.join(TENSOR_KINDS)}, not {kind!r}")
        grid = grid_of(kind, tp)
        if grid is None:
            fitting = [number for number in range(1, 2 * tp + 8) if grid_of(kind, number)]
            near = min(fitting, key=lambda number: abs(number - tp))
            form = {"2d": "q x q", "2.5d": "d x q x q", "3d": "l x l x l"}[kind]
            raise ValueError(f"tensor = {kind} needs tp = {form}: {tp} is not; {near} is")
        return grid


def grid_of(kind: str, tp: int) -> TensorGrid | None:
    """Returns the grid of the kind 2d, 2.5d or 3d; None if `tp` ranks make no such grid."""
    if kind == "3d":
        side = round(tp ** (1 / 3))
        return TensorGrid(side, side, side) if side**3 == tp else None
    side = max(q for q in range(1, math.isqrt(tp) + 1) if tp % (q * q) == 0)
    depth = tp // side**2
    if tp > 1 and (side == 1 or (kind == "2d" and depth > 1)):
        return None
    return TensorGrid(depth, side, side)


def layer_elements(kind: str, tp: int, *, tokens: int, hidden: int) -> float:
    """Returns the number of elements that each of `tp` ranks sends for a layer, in its forward and
    backward pass.

    The layer has attention with as many heads of keys as of queries, and a feed-forward network of
    four times the width; `tokens` are those of a microbatch. The sums of norms, one or two elements
    per token, are not counted. Raises `ValueError` for a `tp` that makes no such grid.

    >>> [round(layer_elements(kind, 8, tokens=8192, hidden=1024) / 2**20) for kind in ("1d", "3d")]
    [56, 35]

    Sources: Shoeybi et al., "Megatron-LM", 2019 (1d); `layers/summa.py` and `layers/tensor_grid.py`
    of `unisono.parallel` name the sources of the other kinds.
    """
    depth, side, columns = TensorGrid.of(kind, tp)
    if kind == "1d":
        return 8 * (columns - 1) / columns * tokens * hidden
    products = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    others = side - 1
    if kind == "3d":
        moved = sum(tokens * (k + n) + k * n for k, n in products)
        return 2 * others / side**3 * moved
    return 3 * others / side**2 * sum(tokens / depth * k + k * n for k, n in products)
