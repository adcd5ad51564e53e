"""Attention after an all-gather of keys and values, or after an all-to-all of heads (Ulysses).

With c ranks, a sequence of T positions, query width h and key-value width h_kv, a rank sends
(c-1)/c 2 T h_kv elements by all-gather, or (c-1)/c (2 T h + 2 T h_kv) / c elements by all-to-all.
It sends as many again in the backward pass. With all-gather a rank holds all keys and values; with
all-to-all, 1/c of all heads.

Sources: Llama Team, "The Llama 3 herd of models", 2024 (all-gather); S. A. Jacobs et al.,
"DeepSpeed Ulysses", 2023 (all-to-all).
"""

from __future__ import annotations

import math

import torch
from torch import distributed as dist
from torch.nn import functional

from unisono.parallel.context.attention_blocks import attend_in_blocks, blocks_of_whole
from unisono.parallel.context.zigzag import in_natural_order, in_zigzag_parts
from unisono.parallel.divisible.exchanges import gather_parts, move_rows


def whole_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool
) -> torch.Tensor:
    """Returns torch's attention, for a rank that holds the whole sequence."""
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=grouped
    )


def all_gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the parts of all ranks, in a new first dimension.

    The gradient of a part is the sum of all ranks' gradients of this part.
    """
    return gather_parts(part.unsqueeze(0), group, dim=0, length=dist.get_world_size(group))


def allgather_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Gathers all keys and values; returns the attention of this rank's queries. Collective."""
    both = torch.cat([key.transpose(1, 2), value.transpose(1, 2)], dim=2)
    whole = in_natural_order(all_gather(both, group)).transpose(1, 2)
    blocks = blocks_of_whole(
        dist.get_rank(group), dist.get_world_size(group), query.shape[2], is_causal=is_causal
    )
    key, value = whole.chunk(2, dim=1)
    return attend_in_blocks(query, key, value, blocks)


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Returns the attention by an all-to-all, after which a rank has all positions of some heads.

    A second all-to-all returns the results to the ranks of the positions. Collective.

    The number of ranks must divide the number of heads. If it does not divide the number of
    key-value heads, these are repeated: lcm(kv_heads, ranks) heads are sent.
    """
    ranks = dist.get_world_size(group)
    repeats = ranks // math.gcd(key.shape[1], ranks)
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    arrays = (query, key, value)
    # Shape (ranks, batch, positions, heads of a rank, head_dim): entry i has the heads of rank i.
    batch, _, length, head_dim = query.shape
    heads = [each.shape[1] // ranks for each in arrays]
    sent = [
        each.transpose(1, 2).reshape(batch, length, ranks, count, head_dim).movedim(2, 0)
        for each, count in zip(arrays, heads, strict=True)
    ]
    whole = in_natural_order(move_rows(torch.cat(sent, dim=3), group))
    parts = (each.transpose(1, 2) for each in torch.split(whole, heads, dim=2))
    out = whole_attention(*parts, is_causal=is_causal).transpose(1, 2)
    received = move_rows(in_zigzag_parts(out, ranks), group)
    return received.permute(1, 0, 3, 2, 4).flatten(1, 2)
