"""Products and exchanges of a layer whose matrices are divided over a plane or a cube of ranks.

The order of the exchanges is that of `unisono.parallel`. Planes (2D, 2.5D) multiply in q steps of
SUMMA: a step broadcasts a block of the input along the row and a block of the weight along the
column. Backward broadcasts both again, and reduces the gradients of both. The q broadcasts of a
group follow each other without a gap, so they take the bytes of one all_gather, and q start-up
times. A cube (3D) gathers the input along one side and the weight along the depth, and scatters the
sum along the third side. Its backward pass exchanges as much.

All exchanges are exposed, as those of 1D without overlap. SUMMA's broadcast of the next block
during a product is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.inputs.grid_products import GridProduct, layer_products
from unisono.planner.inputs.tensor_grid import TensorGrid
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.step_times.exchange_times import ExchangeTimes, GroupPlace

_VALUE_BYTES = 2
_CENTRED_SUMS, _SUMS = 2, 1
"""Numbers that a norm sums for each token: of x and x^2, or of x^2 alone."""


class TensorExchanges(NamedTuple):
    """Seconds of exchanges in the forward and in the backward pass, and the number of exchanges in
    the forward pass.
    """

    forward_s: float
    backward_s: float
    calls: int


class GridTimes:
    """Computes the times of exchanges on one grid of ranks. Sizes are those of the whole grid."""

    def __init__(self, kind: str, tp: int, exchanges: ExchangeTimes) -> None:
        self._is_cube, self._exchanges = kind == "3d", exchanges
        self.grid = TensorGrid.of(kind, tp)
        depth, row, column = self.grid
        # Consecutive ranks differ first in the column, then in the row, then in the depth.
        self._along_row = exchanges.place(column, 1)
        self._along_column = exchanges.place(row, column)
        self._along_depth = exchanges.place(depth, row * column)

    def product_sizes(self, product: GridProduct, tokens: float) -> tuple[float, float, float, int]:
        """Returns the rows, columns and inner length of a rank's product, and its repetitions."""
        depth, row, column = self.grid
        inner, outputs = product.inputs / row, product.outputs / column
        if self._is_cube:
            return tokens / row, outputs, inner, 1
        return tokens / (depth * row), outputs, inner, row

    def layer(self, model: Transformer, tokens: float) -> TensorExchanges:
        """Returns the exchanges of a layer: its products, and the sums of its two norms."""
        parts = [self.product(each, tokens) for each in layer_products(model)]
        sums = _SUMS if model.gated else _CENTRED_SUMS
        own = _VALUE_BYTES * tokens / (self.grid.depth * self.grid.row)
        norms_s = 2 * sums * self._exchanges.all_reduce_s(own, self._along_row)
        return TensorExchanges(
            sum(each.forward_s for each in parts) + norms_s,
            sum(each.backward_s for each in parts) + norms_s,
            sum(each.calls for each in parts) + 2 * sums,
        )

    def output(self, model: Transformer, tokens: float) -> float:
        """Returns the seconds of the exchanges of the output projection, in both passes."""
        found = self.product(GridProduct("output", model.hidden, model.vocab, False), tokens)
        return found.forward_s + found.backward_s

    def product(self, product: GridProduct, tokens: float) -> TensorExchanges:
        """Returns the exchanges of one product."""
        parts = self._cube(product, tokens) if self._is_cube else self._planes(product, tokens)
        forward_s = sum(parts)
        return TensorExchanges(forward_s, forward_s * (1 if self._is_cube else 2), len(parts))

    def _planes(self, product: GridProduct, tokens: float) -> tuple[float, ...]:
        depth, row, column = self.grid
        inputs = _VALUE_BYTES * tokens / (depth * row) * product.inputs
        weights = _VALUE_BYTES * product.inputs * product.outputs / column
        return self._blocks_s(inputs, self._along_row), self._blocks_s(weights, self._along_column)

    def _cube(self, product: GridProduct, tokens: float) -> tuple[float, ...]:
        side = self.grid.row
        inputs = _VALUE_BYTES * tokens / side * product.inputs / side
        weights = _VALUE_BYTES * product.inputs / side * product.outputs / side
        outputs = _VALUE_BYTES * tokens / side * product.outputs / side
        gathered, summed = self._along_column, self._along_row
        if product.is_last:
            gathered, summed = summed, gathered
        gather_s = self._exchanges.gather_s
        return (
            gather_s(inputs, gathered),
            gather_s(weights, self._along_depth),
            gather_s(outputs, summed),
        )

    def _blocks_s(self, nbytes: float, group: GroupPlace) -> float:
        """Returns the seconds in which each rank of a group broadcasts its block, or the ranks
        reduce a block to each of them. `nbytes` is the size of all blocks.
        """
        starts_s = (group.ranks - 1) * self._exchanges.start_s(group)
        return self._exchanges.gather_s(nbytes, group) + starts_s
