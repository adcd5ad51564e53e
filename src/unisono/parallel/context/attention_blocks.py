"""Attention in blocks: the queries and keys of each block, and the merge of the results.

Each block's attention returns its log-sum-exp, the logarithm of the sum of the exponentials of its
scores. With it, the results of two blocks with the same queries and different keys merge exactly.
The backward of a block needs the **merged** output and log-sum-exp, since the softmax is over all
keys.

Sources: T. Dao et al., "FlashAttention", 2022; H. Liu et al., "Ring attention with blockwise
transformers", 2023; the merge and the zigzag blocks are those of zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unisono.torch_backend import attention_on_cpu, attention_on_cpu_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlock:
    """The queries in the slice `queries` attend to the keys in the slice `keys`."""

    queries: slice = field(default_factory=lambda: slice(None))
    keys: slice = field(default_factory=lambda: slice(None))
    is_causal: bool = False
    """True if query i of the block attends to the keys 0 to i of the block only."""


def block_of_ring(rank: int, source: int, length: int, *, is_causal: bool) -> AttentionBlock:
    """Returns which of a rank's queries attend to which of rank `source`'s keys.

    Both ranks hold zigzag parts (an early and a late chunk of the sequence).

    `length`: number of positions in a part, an even number. With a causal mask, each block except
    the rank's own block covers half of the scores and needs no mask.

    >>> block_of_ring(1, 0, 8, is_causal=True).keys, block_of_ring(1, 2, 8, is_causal=True).queries
    (slice(0, 4, None), slice(4, 8, None))
    """
    half = length // 2
    if not is_causal or source == rank:
        return AttentionBlock(is_causal=is_causal)
    # of the source's keys, the early half precedes all queries, the late half follows them
    if source < rank:
        return AttentionBlock(keys=slice(0, half))
    return AttentionBlock(queries=slice(half, length))


def blocks_of_whole(
    rank: int, ranks: int, length: int, *, is_causal: bool
) -> tuple[AttentionBlock, ...]:
    """Returns blocks that cover a rank's queries (a zigzag part) and all keys (in natural order).

    `length`: number of positions in a part. With a causal mask, each of the two chunks of queries
    attends to all keys before the chunk, and to the keys in the chunk.
    """
    if not is_causal:
        return (AttentionBlock(),)
    half = length // 2
    blocks = []
    for place, chunk in enumerate((rank, 2 * ranks - 1 - rank)):
        queries = slice(place * half, (place + 1) * half)
        start = chunk * half
        if start:
            blocks.append(AttentionBlock(queries=queries, keys=slice(0, start)))
        own = slice(start, start + half)
        blocks.append(AttentionBlock(queries=queries, keys=own, is_causal=True))
    return tuple(blocks)


class MergedAttention:
    """The attention of a rank's queries, merged block by block.

    All arrays have the shape (batch, heads, sequence, head_dim), except `logsumexp`: (batch, heads,
    sequence).
    """

    def __init__(self, query: torch.Tensor) -> None:
        """The rows of `query` must be dense, as `with_dense_rows` returns them."""
        self._query = query
        self.out = torch.zeros_like(query)
        self.logsumexp = query.new_full(query.shape[:-1], -torch.inf)

    def add(self, keys: tuple[torch.Tensor, ...], block: AttentionBlock) -> None:
        """Attends to one block, and merges the result.

        `keys`: the arrays of keys and of values, of which the block selects a slice.
        """
        query, out = self._query[:, :, block.queries], self.out[:, :, block.queries]
        logsumexp = self.logsumexp[:, :, block.queries]
        key, value = (each[:, :, block.keys] for each in keys)
        added, its_logsumexp = attention_on_cpu(query, key, value, 0.0, block.is_causal)
        share = torch.sigmoid(its_logsumexp - logsumexp)
        out.lerp_(added, share.unsqueeze(-1))
        logsumexp.copy_(torch.logaddexp(logsumexp, its_logsumexp))


class AttentionGradient:
    """The gradients of an attention whose result was merged from blocks."""

    def __init__(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
    ) -> None:
        """`gradient`: the gradient of `out`.

        `out` and `logsumexp`: the results of the forward pass, merged from all blocks.
        """
        self._of_queries = (with_dense_rows(gradient), query, out, logsumexp)
        self.query = torch.zeros_like(query)
        """The gradient of the queries, summed over the blocks so far."""

    def add(
        self, keys: tuple[torch.Tensor, ...], block: AttentionBlock
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds a block's gradient of the queries; returns the gradients of its keys and values."""
        gradient, query, out, logsumexp = (each[:, :, block.queries] for each in self._of_queries)
        key, value = (each[:, :, block.keys] for each in keys)
        of_query, of_key, of_value = attention_on_cpu_backward(
            gradient, query, key, value, out, logsumexp, 0.0, block.is_causal
        )
        self.query[:, :, block.queries] += of_query
        return of_key, of_value


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[AttentionBlock],
) -> torch.Tensor:
    """Returns the merged attention of the blocks. Each query must be in at least one block."""
    rows = (with_dense_rows(each) for each in (query, key, value))
    found: torch.Tensor = _BlockwiseAttention.apply(*rows, tuple(blocks))  # type: ignore[no-untyped-call]
    return found


def with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x with the elements of its last dimension adjacent in memory.

    The attention kernel returns wrong results for other arrays, without an error.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: tuple[AttentionBlock, ...],
    ) -> torch.Tensor:
        merged = MergedAttention(query)
        for block in blocks:
            merged.add((key, value), block)
        ctx.save_for_backward(query, key, value, merged.out, merged.logsumexp)
        ctx.blocks = blocks
        return merged.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        gradient = AttentionGradient(gradients[0], query, out, logsumexp)
        of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
        for block in ctx.blocks:
            found = gradient.add((key, value), block)
            of_key[:, :, block.keys] += found[0]
            of_value[:, :, block.keys] += found[1]
        return gradient.query, of_key, of_value, None
