"""Tensor parallelism in 1D: ranks divide the outputs of one matrix and the inputs of the next.

Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., 2022 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.divisible.exchanges import (
    Group,
    copy_to_all,
    gather_parts,
    sum_of_all,
    sum_to_parts,
)
from unisono.parallel.divisible.interfaces import MicrobatchPart
from unisono.parallel.divisible.parameter_block import cut, sum_over_tp
from unisono.parallel.training_mesh import TrainingMesh

SEQUENCE = 1
"""The dimension of an activation (batch, sequence, width) that sequence parallelism divides."""


class Tensor1D:
    """The matrices of a layer, divided over a line of ranks.

    A layer has first matrices, which map its input to the inner activation, and a last matrix,
    which maps the inner activation to the output. Activations have the shape (samples, sequence,
    width). Without a mesh, or with one rank on `tp`, nothing is divided. With sequence parallelism,
    `enter` gathers the sequence and `leave` scatters it.
    """

    def __init__(self, mesh: TrainingMesh | None = None) -> None:
        self._mesh = mesh
        self.group: Group = mesh.group("tp") if mesh else None
        self.parts = mesh.layout.tp if mesh else 1
        """Number of parts into which the inner width is split."""
        self.is_sequence_divided = bool(mesh and self.group and mesh.layout.sequence_parallel)

    def divide_first(self, linear: nn.Linear) -> None:
        """Keeps the rows of weight and bias that compute this rank's outputs."""
        for name in ("weight", "bias"):
            self._cut(linear, name, dim=0)

    def divide_last(self, linear: nn.Linear) -> None:
        """Keeps the columns of the weight for this rank's inputs, and the whole bias.

        The bias is added after the sum over the ranks.
        """
        self._cut(linear, "weight", dim=1)
        self.divide_between(linear, "bias")

    def divide_table(self, module: nn.Module, name: str) -> None:
        """Keeps this rank's rows of an embedding table."""
        self._cut(module, name, dim=0)

    def divide_between(self, module: nn.Module, name: str) -> None:
        """Marks a parameter between layers, such as the weight of a norm, which stays whole.

        With sequence parallelism the ranks of `tp` see different tokens between layers, so the
        gradient of the parameter is summed over the whole stage.
        """
        parameter: nn.Parameter | None = getattr(module, name)
        if parameter is not None and self.is_sequence_divided:
            sum_over_tp(parameter)

    def _cut(self, module: nn.Module, name: str, *, dim: int) -> None:
        if self._mesh is not None:
            cut(module, name, self._mesh, dim=dim)

    def first(self, x: torch.Tensor, linears: Sequence[nn.Linear]) -> list[torch.Tensor]:
        """Returns the product of x with each first matrix: an inner activation."""
        x = self.enter(x)
        return [functional.linear(x, each.weight, each.bias) for each in linears]

    def last(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Returns the product of x with a last matrix: an activation between layers."""
        y = self.leave(functional.linear(x, linear.weight))
        return y if linear.bias is None else y + linear.bias

    def look_up(
        self, tokens: torch.Tensor, table: torch.Tensor, *, first: int, width: int
    ) -> torch.Tensor:
        """Returns the vectors of tokens (samples, sequence), as an activation between layers.

        `table` is this rank's block, which begins at row `first` of the whole table. The whole
        table has vectors of `width` elements.
        """
        return self.leave(own_rows(tokens, table, first))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the whole activation, the input of the divided matrices: gathered if sequence
        parallelism splits it."""
        if not self.is_sequence_divided:
            return copy_to_all(x, self.group)
        assert self._mesh is not None
        return gather_parts(x, self.group, dim=SEQUENCE, length=self._mesh.sequence)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' results; with sequence parallelism, this rank's part."""
        if not self.is_sequence_divided:
            return sum_of_all(x, self.group)
        return sum_to_parts(x, self.group, dim=SEQUENCE)

    def first_elements(self, part: MicrobatchPart, linears: Sequence[nn.Linear]) -> float:
        """Returns the elements that this rank sends for `first`, forward and backward."""
        return self._activation_elements(part, linears[0].in_features)

    def last_elements(self, part: MicrobatchPart, linear: nn.Linear) -> float:
        """Returns the elements that this rank sends for `last`, forward and backward."""
        return self._activation_elements(part, linear.out_features)

    def look_up_elements(self, part: MicrobatchPart, vocab: int, width: int) -> float:
        """Returns the elements that this rank sends for `look_up`, forward and backward.

        `vocab`, `width`: the sizes of the whole table.
        """
        return self._activation_elements(part, width)

    def sum_elements(self, part: MicrobatchPart, count: int) -> float:
        """Returns the elements that this rank sends to sum one number per token over the ranks that
        divide a vector, `count` times."""
        mesh = self._mesh
        if mesh is None or self.group is None:
            return 0.0
        return count * mesh.sum_elements(part.tokens, "tp")

    def _activation_elements(self, part: MicrobatchPart, width: int) -> float:
        """Returns the elements sent for an activation between layers, forward and backward: a sum,
        or with sequence parallelism a gather and a reduce_scatter of equal parts."""
        mesh = self._mesh
        if mesh is None or self.group is None:
            return 0.0
        if not self.is_sequence_divided:
            return mesh.sum_elements(part.tokens * width, "tp")
        longest = -(-mesh.sequence // self.parts)
        return 2 * (self.parts - 1) * longest * part.samples * width


def own_rows(tokens: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    """Returns the vectors of the tokens whose rows are in `table`, and zeros for other tokens.

    `table` is a part of the whole embedding table that begins at row `first`.
    """
    rows = table.shape[0]
    if rows == 0:
        return table.sum() * 0 + table.new_zeros(*tokens.shape, table.shape[1])
    is_here = (tokens >= first) & (tokens < first + rows)
    found = functional.embedding((tokens - first).clamp(0, rows - 1), table)
    return found * is_here.unsqueeze(-1)
