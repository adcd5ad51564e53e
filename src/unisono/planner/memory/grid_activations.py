"""Bytes that a layer keeps for the backward pass on a grid of ranks, beyond a rank's own blocks."""

from __future__ import annotations

from unisono.planner.inputs.grid_products import layer_products
from unisono.planner.inputs.tensor_grid import TensorGrid
from unisono.planner.inputs.transformer import Transformer

_VALUE_BYTES = 2


def gathered_bytes(model: Transformer, kind: str, tp: int, tokens: float) -> float:
    """Returns the bytes of gathered inputs and weights, without a rank's own blocks of the inputs.

    `tokens`: tokens of a microbatch on the whole grid. Tensor parallelism in 3D keeps the gathered
    input and weight of each product. Planes (2D, 2.5D) broadcast the blocks again in the backward
    pass, so they keep nothing more.

    >>> gpt = Transformer(layers=1, hidden=8, heads=2, vocab=10)
    >>> gathered_bytes(gpt, "2d", 4, 100), gathered_bytes(gpt, "3d", 8, 100)
    (0.0, 1784.0)
    """
    if kind != "3d":
        return 0.0
    side = TensorGrid.of(kind, tp).row
    found = 0.0
    for each in layer_products(model):
        gathered = (tokens * each.inputs + each.inputs * each.outputs) / side**2
        found += _VALUE_BYTES * (gathered - tokens * each.inputs / side**3)
    return found
