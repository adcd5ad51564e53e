"""FLOPs and bytes of each operator of a recommendation model, in closed form.

Sizes are those of one device and one microbatch. A matrix product of [M, K] and [K, N] has 2 M K N
FLOPs and reads or writes M K + K N + M N values. In the backward pass, each factor that needs a
gradient adds one product with the same number of FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import expm1, log1p
from typing import NamedTuple

from unisono.planner.recommendation.dlrm import Dlrm
from unisono.planner.recommendation.exchange_traffic import ID_BYTES
from unisono.planner.recommendation.table_placement import TablePlacement

TABLE_BYTES = 4
"""Bytes of an element of an embedding table. Tables are float32 in every precision."""
_OFFSET_BYTES = 8
TABLE_UPDATES = ("rows", "dense")
"""Updates of a table that is not replicated, in the backward pass. rows: the rows of the ids, with
row-wise Adagrad (one state for each row), as TorchRec and MLPerf do. dense: a gradient of the whole
table, and Adam, as `unisono.parallel` does."""


class Product(NamedTuple):
    """`copies` products of [rows, inner] and [inner, columns], of which `gradients` factors need a
    gradient.
    """

    name: str
    kind: str
    rows: float
    columns: float
    inner: float
    copies: float = 1
    gradients: int = 2

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass."""
        return 2 * self.rows * self.columns * self.inner * self.copies

    @property
    def backward_flops(self) -> float:
        """FLOPs of the backward pass."""
        return self.gradients * self.flops


class Kernel(NamedTuple):
    """Operator between products, with the numbers of values that each pass reads and writes."""

    name: str
    kind: str
    forward_values: float
    backward_values: float


def products(model: Dlrm, samples: float) -> Iterator[Product]:
    """Yields the matrix products, in the order of the forward pass.

    >>> from unisono.planner.recommendation import Dlrm, TableShape
    >>> shape = Dlrm(counters=2, width=4, tables=(TableShape(rows=9),), bottom=(), top=())
    >>> [(each.name, each.flops) for each in products(shape, 10)]
    [('bottom 0', 160), ('dot products', 320), ('top 0', 100)]
    """
    for number, (inner, outer) in enumerate(pairwise(model.bottom_widths)):
        # The dense features, which are the input of the first layer, need no gradient.
        gradients = 1 if number == 0 else 2
        yield Product(f"bottom {number}", "matmul", samples, outer, inner, 1, gradients)
    count = model.vectors
    if model.interaction == "dot":
        yield Product("dot products", "interaction", count, count, model.width, samples)
    for number in range(model.cross_layers):
        inputs, rank = count * model.width, model.cross_rank
        yield Product(f"cross {number} down", "interaction", samples, rank, inputs)
        yield Product(f"cross {number} up", "interaction", samples, inputs, rank)
    for number, (inner, outer) in enumerate(pairwise(model.top_widths)):
        yield Product(f"top {number}", "matmul", samples, outer, inner)


def kernels(model: Dlrm, samples: float) -> Iterator[Kernel]:
    """Yields the operators between products.

    An activation reads and writes a value; its backward pass reads the gradient and the result, and
    writes a gradient. The other operators copy: they join the vectors, and select the pairs of the
    dot products. A cross layer multiplies by the first input and adds the last one.
    """
    for name, widths in (("bottom", model.bottom_widths[1:]), ("top", model.top_widths[1:-1])):
        values = samples * sum(widths)
        yield Kernel(f"{name} activations", "memory", 2 * values, 3 * values)
    vectors = samples * model.vectors * model.width
    yield Kernel("joined vectors", "interaction", 2 * vectors, 2 * vectors)
    if model.interaction == "dot":
        pairs, inputs = samples * model.interactions, samples * model.top_widths[0]
        backward = 2 * inputs + pairs + samples * model.vectors**2
        yield Kernel("selected pairs", "interaction", 2 * (pairs + inputs), backward)
    for number in range(model.cross_layers):
        yield Kernel(f"cross {number} sum", "interaction", 4 * vectors, 6 * vectors)


def lookup_bytes(
    model: Dlrm,
    placement: TablePlacement,
    rank: int,
    *,
    samples: float,
    value_bytes: float,
    update: str,
) -> tuple[float, float]:
    """Returns the bytes that the look-ups of one rank read and write forward and backward: of all
    ranks' samples in its parts of tables, and of its own samples in replicated tables.

    `samples`: samples of a microbatch on one rank. `value_bytes`: bytes of an element of a sum.
    `update`: one of `TABLE_UPDATES`. Assumes full bags, and ids that are spread evenly over the
    rows. Caches are ignored: every id reads its row from memory.
    """
    found = []
    for piece in placement.pieces(rank):
        rows, columns = piece.sizes
        whole, held = samples * placement.ranks, model.tables[piece.table]
        # Column parts see all ids; row parts see the ids of their rows.
        ids = whole * held.ids * rows / held.rows
        found.append(_lookup_bytes(rows, columns, whole, ids, value_bytes, update))
    for table in placement.tables:
        if table.kind == "replicated":
            rows, ids = table.shape.rows, samples * table.shape.ids
            found.append(_lookup_bytes(rows, model.width, samples, ids, value_bytes, "dense"))
    return sum(each[0] for each in found), sum(each[1] for each in found)


def _lookup_bytes(
    rows: int, columns: int, samples: float, ids: float, value_bytes: float, update: str
) -> tuple[float, float]:
    numbers = ID_BYTES * ids + _OFFSET_BYTES * samples
    forward = numbers + ids * columns * TABLE_BYTES + samples * columns * value_bytes
    gradients = numbers + ids * columns * value_bytes
    if update == "dense":
        # Writes zeros to the whole gradient, then reads and writes a row for each id.
        moved = rows * columns + 2 * ids * columns
    else:
        moved = distinct_ids(rows, ids) * 2 * (columns + 1)
    return forward, gradients + moved * TABLE_BYTES


def distinct_ids(rows: int, ids: float) -> float:
    """Returns the expected number of distinct rows among `ids` ids, evenly spread over the rows.

    >>> distinct_ids(1, 5), distinct_ids(2, 1), round(distinct_ids(2, 2), 9)
    (1.0, 1.0, 1.5)
    """
    if rows < 2:
        return float(rows)
    return -rows * expm1(ids * log1p(-1 / rows))


def activation_values(model: Dlrm) -> int:
    """Returns the values that the dense part keeps for the backward pass of one sample.

    These are the inputs of all products: the dense features, the results of activations, the
    vectors, and the input of the top network. A cross layer keeps its input, and the inputs and
    the result of its last product.
    """
    vectors = model.vectors * model.width
    if model.interaction == "dot":
        between = vectors + model.top_widths[0]
    else:
        between = vectors + model.cross_layers * (2 * vectors + model.cross_rank)
    return model.counters + sum(model.bottom_widths[1:]) + between + sum(model.top_widths[1:-1])
