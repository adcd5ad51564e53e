"""Attention over a sequence that is split across a group's ranks, by one of three exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import distributed as dist

from unisono.division import nearest_divisor
from unisono.parallel.context.gathered_attention import (
    allgather_attention,
    ulysses_attention,
    whole_attention,
)
from unisono.parallel.context.ring_attention import ring_attention
from unisono.parallel.divisible.interfaces import MicrobatchPart

CONTEXT_KINDS = ("ring", "ulysses", "allgather")
"""Kinds of exchange between ranks. `ring` sends keys and values around a ring of ranks, and holds
two blocks at a time. `ulysses` gives each rank all positions of some heads. `allgather` gathers all
keys and values."""

_ATTENTIONS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {"ring": ring_attention, "ulysses": ulysses_attention, "allgather": allgather_attention}
)
_TYPES = (torch.float32, torch.float64)
_AUTOCAST_TYPES = (torch.bfloat16, torch.float16)


class ContextAttention:
    """Scaled dot-product attention of this rank's positions to the positions of all ranks.

    Each rank of the group holds the positions that `zigzag_part` returns, in that order.

    >>> attention = ContextAttention("ring", None)
    >>> query, key = torch.ones(1, 4, 8, 2), torch.ones(1, 2, 8, 2)
    >>> attention(query, key, key).shape
    torch.Size([1, 4, 8, 2])
    """

    def __init__(self, kind: str, group: dist.ProcessGroup | None) -> None:
        """`kind`: one of `CONTEXT_KINDS`. `group`: None for a single rank, which needs no exchange.

        Raises `ValueError` for another kind.
        """
        if kind not in CONTEXT_KINDS:
            raise ValueError(f"kind: expected one of {', '.join(CONTEXT_KINDS)}, got {kind!r}")
        self.kind = kind
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool = True,
    ) -> torch.Tensor:
        """Returns the attention in the shape of `query`. Collective in forward and in backward.

        `query`: (batch, heads, positions of this rank, head_dim). `key` and `value` may have fewer
        heads; their number divides that of `query`. With several ranks, the tensors must be float32
        or float64 on the CPU, except under autocast: then `ulysses` exchanges them as they are, and
        the other kinds in float32. Raises `ValueError` for others and for other shapes.
        """
        self._check_shapes(query, key, value)
        if self.group is None or self.ranks == 1:
            return whole_attention(query, key, value, is_causal=is_causal)
        is_autocast = torch.is_autocast_enabled("cpu")
        if is_autocast and not (self.kind == "ulysses" and query.dtype == key.dtype == value.dtype):
            # the kernels of blocks need float32
            query, key, value = (
                each.float() if each.dtype in _AUTOCAST_TYPES else each
                for each in (query, key, value)
            )
        self._check_division(query, key, value, is_autocast=is_autocast)
        return _ATTENTIONS[self.kind](query, key, value, self.group, is_causal=is_causal)

    def _check_shapes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.dim() != 4 or 0 in query.shape[1:]:
            raise ValueError(
                "query: expected (batch, heads, positions, head_dim), all but the batch at least "
                f"1, got {tuple(query.shape)}"
            )
        batch, heads, length, head_dim = query.shape
        kv_heads = key.shape[1] if key.dim() == 4 else 0
        for name, each in (("key", key), ("value", value)):
            wanted = (batch, kv_heads, length, head_dim)
            if each.shape != wanted or kv_heads == 0 or heads % kv_heads:
                raise ValueError(
                    f"{name}: expected ({batch}, a divisor of {heads}, {length}, {head_dim}), as "
                    f"query and key have, got {tuple(each.shape)}"
                )

    def _check_division(self, query: torch.Tensor, *keys: torch.Tensor, is_autocast: bool) -> None:
        found = {(each.dtype, each.device.type) for each in (query, *keys)}
        types = (*_TYPES, *_AUTOCAST_TYPES) if is_autocast else _TYPES
        if found not in [{(dtype, "cpu")} for dtype in types]:
            names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in found))
            raise ValueError(
                f"{self.kind} attention: expected float32 or float64 arrays on the CPU, "
                f"all of one type, got {names}"
            )
        _, heads, length, _ = query.shape
        if length % 2:
            raise ValueError(
                "positions of this rank: expected an even number, two chunks of a zigzag, "
                f"got {length}"
            )
        if self.kind == "ulysses" and heads % self.ranks:
            raise ValueError(
                f"ulysses attention: {self.ranks} ranks do not divide {heads} heads; "
                f"{nearest_divisor(heads, self.ranks)} do, and so do the other kinds"
            )

    def bytes_sent(
        self, *, heads: int, kv_heads: int, head_dim: int, tokens: int, part: MicrobatchPart
    ) -> float:
        """Returns the bytes that a rank sends for the attention of `tokens` positions, forward and
        backward. Attention to blocks of keys computes in float32 at least."""
        others = self.ranks - 1
        narrow, wide = (each * head_dim * tokens for each in (kv_heads, heads))
        if self.kind == "ring" and others:
            return 2 * narrow * (2 * others + self.ranks) * part.wide_bytes
        if self.kind == "allgather":
            return 2 * 2 * narrow * others * part.wide_bytes
        # heads of keys and values are repeated until the ranks divide them
        copies = math.lcm(kv_heads, self.ranks) // kv_heads
        return 2 * others / self.ranks * 2 * (wide + copies * narrow) * part.item_bytes
