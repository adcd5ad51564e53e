"""The products of a layer, as tensor parallelism on a grid of ranks computes them."""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.inputs.transformer import Transformer


class GridProduct(NamedTuple):
    """A product of a layer: its name, and the inputs and outputs of the whole matrix.

    Products form pairs: attention and the feed-forward network have a first and a last product. On
    a cube, the last product of a pair uses two of the axes in exchanged roles.
    """

    name: str
    inputs: int
    outputs: int
    is_last: bool


def layer_products(model: Transformer) -> tuple[GridProduct, ...]:
    """Returns the products of a dense layer. Products with the same input count as one."""
    h, out = model.hidden, model.heads * model.head_dim
    inner = (model.matrices - 1) * model.ffn
    return (
        GridProduct(
            "queries, keys and values", h, model.query_width + model.key_value_width, False
        ),
        GridProduct("attention output", out, h, True),
        GridProduct("feed-forward in", h, inner, False),
        GridProduct("feed-forward out", model.ffn, h, True),
    )
