"""Ring attention: ranks send blocks of keys and values around a ring, and attend to each block.

With c ranks, a sequence of T positions and key-value width h_kv, a rank sends (c-1)/c 2 T h_kv
elements forward. Backward it sends them again, and c/c 2 T h_kv elements of gradients: the
gradients of a block follow the block by one step, and return to the block's rank in c hops.

Sources: H. Liu et al., "Ring attention with blockwise transformers for near-infinite context",
2023; the zigzag blocks are those of zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from unisono.parallel.context.attention_blocks import (
    AttentionGradient,
    MergedAttention,
    block_of_ring,
    with_dense_rows,
)

Tensors = tuple[torch.Tensor, ...]


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Returns the attention of this rank's zigzag part to the whole sequence. Collective.

    The shapes are those of `ContextAttention`. Besides its own block of keys and values, a rank
    holds two blocks at a time.
    """
    found: torch.Tensor = _RingAttention.apply(query, key, value, group, is_causal)  # type: ignore[no-untyped-call]
    return found


class _RingAttention(torch.autograd.Function):
    """An autograd node without parameters.

    Pipeline schedules that split the backward pass would run the backward of a node with parameters
    twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        is_causal: bool,
    ) -> torch.Tensor:
        query = with_dense_rows(query)
        own = _contiguous(_swapped((key, value)))
        ring = RingExchange(group)
        merged = MergedAttention(query)
        for source, keys in ring.visit(own):
            block = block_of_ring(ring.rank, source, query.shape[2], is_causal=is_causal)
            merged.add(_swapped(keys), block)
        ctx.save_for_backward(query, *own, merged.out, merged.logsumexp)
        ctx.group, ctx.is_causal = group, is_causal
        return merged.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, *own, out, logsumexp = ctx.saved_tensors
        gradient = AttentionGradient(gradients[0], query, out, logsumexp)
        ring = RingExchange(ctx.group)
        sums = _TravellingSums(ring)
        for source, keys in ring.visit(tuple(own)):
            block = block_of_ring(ring.rank, source, query.shape[2], is_causal=ctx.is_causal)
            sums.add(_swapped(gradient.add(_swapped(keys), block)), block.keys)
        return gradient.query, *_swapped(sums.returned()), None, None


class _TravellingSums:
    """Sums of the gradients of a block's keys and values; they follow the block around the ring."""

    def __init__(self, ring: RingExchange) -> None:
        self._ring = ring
        self._present: Tensors | None = None
        self._arriving: PendingExchange | None = None

    def add(self, found: Tensors, keys: slice) -> None:
        """Adds this rank's gradients to a block's sums, and sends the sums to the next rank.

        The sums arrive from the previous rank. The first block is the rank's own: its sums begin
        with this rank's gradients, which cover all its keys.
        """
        spare = self._present
        if self._arriving is None:
            self._present = _contiguous(found)
        else:
            self._present = self._arriving.wait()
            for total, each in zip(self._present, found, strict=True):
                total[:, keys] += each
        self._arriving = self._ring.start(self._present, spare)

    def returned(self) -> Tensors:
        """Returns the sums of all ranks for this rank's own block."""
        assert self._arriving is not None  # set by the first call of `add`
        return self._arriving.wait()


def _swapped(tensors: Tensors) -> Tensors:
    """Returns the tensors with the dimensions of sequence and heads exchanged.

    Messages have the layout (batch, sequence, heads, head_dim) of the kernel's results, so the
    results are sent without a copy.
    """
    return tuple(each.transpose(1, 2) for each in tensors)


def _contiguous(tensors: Tensors) -> Tensors:
    return tuple(each.contiguous() for each in tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingExchange:
    """A pending send of tensors to the next rank and receive of tensors from the previous rank."""

    received: Tensors
    works: Sequence[dist.Work]

    def wait(self) -> Tensors:
        """Waits for the send and the receive; returns the received tensors.

        Raises the errors of the group's backend.
        """
        for work in self.works:
            work.wait()
        return self.received


class RingExchange:
    """The ranks of a group as a ring, in which each rank sends to the next rank only."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._next = (self.rank + 1) % self.ranks
        self._previous = (self.rank - 1) % self.ranks

    def start(self, sent: Tensors, into: Tensors | None = None) -> PendingExchange:
        """Begins to send contiguous tensors, and to receive the tensors of the previous rank.

        `into`: tensors to receive into; by default new ones. The caller must not change `sent` or
        `into` until `wait` returns.
        """
        received = into or tuple(torch.empty_like(each) for each in sent)
        messages = [
            dist.P2POp(dist.isend, each, group=self._group, group_peer=self._next) for each in sent
        ] + [
            dist.P2POp(dist.irecv, each, group=self._group, group_peer=self._previous)
            for each in received
        ]
        return PendingExchange(received=received, works=dist.batch_isend_irecv(messages))

    def visit(self, own: Tensors) -> Iterator[tuple[int, Tensors]]:
        """Yields (rank, tensors) for every rank: this rank, then the previous rank, and so on.

        The next tensors arrive while the caller computes with the current tensors. Two buffers hold
        them in turn, so the caller must not keep them. Each rank sends `ranks - 1` times.
        """
        present, spare = own, None
        for step in range(self.ranks):
            is_last = step == self.ranks - 1
            arriving = None if is_last else self.start(present, spare)
            yield (self.rank - step) % self.ranks, present
            if arriving is not None:
                # the caller's `own` must not be overwritten
                spare = None if present is own else present
                present = arriving.wait()
