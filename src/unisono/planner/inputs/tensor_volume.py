"""The elements that tensor parallelism sends in a decoder layer, by kind."""

from __future__ import annotations

from unisono.planner.inputs.tensor_grid import TensorGrid


def layer_elements(kind: str, tp: int, *, tokens: int, hidden: int) -> float:
    """Returns the elements that each of `tp` ranks sends for a layer, forward and backward.

    The layer has attention with as many heads of keys as of queries, and a feed-forward network of
    four times the width; `tokens` are those of a microbatch. The sums of norms, one or two elements
    per token, are not counted. Raises `ValueError` for a `tp` that makes no such grid.

    >>> [round(layer_elements(kind, 8, tokens=8192, hidden=1024) / 2**20) for kind in ("1d", "3d")]
    [56, 35]

    Sources: Shoeybi et al., "Megatron-LM", 2019 (1d); `layers/summa.py` and `layers/tensor_3d.py`
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
