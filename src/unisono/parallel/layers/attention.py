"""Self-attention: tensor parallelism divides the heads, and context parallelism the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from unisono.division import nearest_divisor
from unisono.parallel.context import ContextAttention
from unisono.parallel.context.zigzag import own_positions
from unisono.parallel.divisible.interfaces import ALL_ACTIVATIONS, MicrobatchPart
from unisono.parallel.divisible.parameter_block import cut
from unisono.parallel.layers.tensor_parallel import tensor_parallel
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Layout, Transformer, require_heads


class SelfAttention(nn.Module):
    """Attention with `heads` query heads and `kv_heads` heads of keys and values.

    Input and output have the shape (batch, sequence, hidden).
    """

    serves = ALL_ACTIVATIONS

    def __init__(
        self,
        shape: Transformer,
        *,
        is_causal: bool = True,
        context: str = "ring",
        rotary_base: float | None = None,
    ) -> None:
        """`context`: kind of the exchange of keys and values on `cp`; see `ContextAttention`.
        `rotary_base`: base of the angles of rotary positions; None: queries and keys do not turn.

        Raises `ValueError` for rotary positions of heads that have no pairs of features.
        """
        super().__init__()
        if rotary_base is not None and shape.head_dim % 2:
            raise ValueError(
                f"rotary_base: expected an even head_dim, got {shape.head_dim}; "
                f"{shape.head_dim + 1} works"
            )
        self.rotary_base = rotary_base
        self.head_dim, self.is_causal, self.context = shape.head_dim, is_causal, context
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        has_bias = not shape.gated
        self.query = nn.Linear(shape.hidden, wide, bias=has_bias)
        self.key = nn.Linear(shape.hidden, narrow, bias=has_bias)
        self.value = nn.Linear(shape.hidden, narrow, bias=has_bias)
        self.output = nn.Linear(wide, shape.hidden, bias=has_bias)
        self._tensor = tensor_parallel()
        self._attend = ContextAttention(context, None)
        self._sample_parts = 1
        """Number of parts into which tensor parallelism splits the samples."""
        self._mesh: TrainingMesh | None = None

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's heads.

        If a line of ranks has more ranks than there are heads of keys and values, several ranks
        keep the same head, and sum its gradient. Raises `ValueError` if the ranks cannot divide the
        heads.
        """
        self._mesh, self._tensor = mesh, tensor_parallel(mesh)
        if mesh.layout.tensor == "1d":
            require_heads(self.heads, self.kv_heads, self._tensor.parts)
        else:
            self._require_side(self._tensor.parts)
        self._tensor.divide_first(self.query)
        copies = self.head_copies(mesh.layout)
        for linear in (self.key, self.value):
            if copies == 1:
                self._tensor.divide_first(linear)
            else:
                for name in ("weight", "bias"):
                    cut(linear, name, mesh, dim=0, axis="tp_row", copies="column_tokens")
        self._tensor.divide_last(self.output)
        self._attend = ContextAttention(self.context, mesh.group("cp"))
        self._sample_parts = mesh.layout.tp // self._tensor.parts

    def head_copies(self, layout: Layout) -> int:
        """Returns the number of ranks of `tp` that hold the same head of keys and values."""
        return max(layout.tp // self.kv_heads, 1) if layout.tensor == "1d" else 1

    def _require_side(self, side: int) -> None:
        for name, heads in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            if heads % side:
                raise ValueError(
                    f"the side of the grid of tp must divide {name}: {side} does not divide "
                    f"{heads}; {nearest_divisor(heads, side)} does"
                )

    def _firsts(self) -> tuple[nn.Linear, ...]:
        return self.query, self.key, self.value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            torch.unflatten(y, -1, (-1, self.head_dim)).transpose(1, 2)
            for y in self._tensor.first(x, self._firsts())
        )
        if self.rotary_base is not None:
            positions = self._positions(query.shape[2])
            query, key = rotated((query, key), positions, base=self.rotary_base)
        mixed = self._attend(query, key, value, is_causal=self.is_causal)
        return self._tensor.last(mixed.transpose(1, 2).flatten(2), self.output)

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank sends on `tp` and `cp` in a step; see `Exchanging`."""
        tensor, firsts, on_tp, on_cp = self._tensor, self._firsts(), 0.0, 0.0
        for each in parts:
            moved = tensor.first_elements(each, firsts) + tensor.last_elements(each, self.output)
            on_tp += moved * each.item_bytes
            on_cp += self._attend.bytes_sent(
                heads=self.heads // tensor.parts,
                kv_heads=max(self.kv_heads // tensor.parts, 1),
                head_dim=self.head_dim,
                tokens=each.tokens // self._sample_parts,
                part=each,
            )
        return {"tp": on_tp, "cp": on_cp}

    def _positions(self, count: int) -> torch.Tensor:
        """Returns the positions of this rank's queries in the whole sequence."""
        if self._mesh is None:
            return torch.arange(count)
        return own_positions(self._mesh, length=count * self._mesh.layout.cp)


def rotated(
    tensors: tuple[torch.Tensor, ...], positions: torch.Tensor, *, base: float
) -> tuple[torch.Tensor, ...]:
    """Returns queries or keys (batch, heads, positions, head_dim), turned by their positions.

    The product of a query and a key then depends on their distance. Su et al., "RoFormer: enhanced
    transformer with rotary position embedding", 2021. Pairs and roundings are those of Llama in
    transformers: feature i turns with feature i + head_dim / 2, by rates in float32.

    `positions`: int64, in the whole sequence. Pair i of features turns by position x base^(-2 i /
    head_dim).

    >>> x = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])
    >>> (found,) = rotated((x,), torch.tensor([0, 1]), base=10000.0)
    >>> [[round(each, 4) for each in row] for row in found[0, 0].tolist()]
    [[1.0, 0.0], [0.5403, 0.8415]]
    """
    width, dtype = tensors[0].shape[-1], torch.promote_types(tensors[0].dtype, torch.float32)
    powers = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    angles = positions.to(dtype).unsqueeze(-1) * (1.0 / base**powers).to(dtype)
    cosines, sines = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return tuple(x * cosines.to(x.dtype) + _turned(x) * sines.to(x.dtype) for x in tensors)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Returns each pair of features, turned by a right angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
