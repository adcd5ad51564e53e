"""`scaled_dot_product_attention` of queries, keys and values that are divided by positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from unisono.parallel.positions.function_call import FunctionCall
from unisono.parallel.positions.sequence_part import Placement, placement_of

_HALVES = (torch.bfloat16, torch.float16)


def attention(call: FunctionCall) -> Any:
    """Computes the attention of this rank's positions to the whole sequence. Collective.

    Without a mask, keys and values pass around a ring of ranks. With a mask, which the model has
    made for the whole sequence, they are gathered, and this rank takes its rows of the mask.
    """
    query, key, value = (call.option(name, n) for n, name in enumerate(("query", "key", "value")))
    mask, dropout = call.option("attn_mask", 3), call.option("dropout_p", 4, 0.0)
    is_causal, scale = call.option("is_causal", 5, False), call.option("scale", 6)
    placement = placement_of(query)
    if placement != Placement(query.dim() - 2) or query.dim() != 4:
        call.refuse("needs queries (samples, heads, positions, features), divided by positions")
    is_divided = placement_of(key) is not None
    if any(placement_of(each) != (placement if is_divided else None) for each in (key, value)):
        call.refuse("needs keys and values that are divided as the queries are")
    is_plain = mask is None and not dropout and query.shape[-1] == value.shape[-1]
    if is_divided and is_plain:
        return call.placed(_in_a_ring(call, query, key, value, is_causal, scale), placement)
    if is_divided:
        key, value = call.gathered(key, value)
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_rows(call, mask, key, is_causal=is_causal),
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return call.placed(out, placement)


def _in_a_ring(
    call: FunctionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    dtype, usual = query.dtype, 1 / math.sqrt(query.shape[-1])
    # without placements, which a watched backward pass would find in its saved tensors
    query, key, value = (each.view_as(each) for each in (query, key, value))
    if dtype in _HALVES:  # the blocks of a ring are merged in float32
        query, key, value = query.float(), key.float(), value.float()
    if scale is not None and not math.isclose(scale, usual, rel_tol=1e-15):
        query = query * (scale / usual)
    return call.attention(query, key, value, is_causal=is_causal).to(dtype)


def _rows(
    call: FunctionCall, mask: torch.Tensor | None, key: torch.Tensor, *, is_causal: bool
) -> torch.Tensor | None:
    """Returns the rows of a mask for this rank's queries."""
    if mask is None:
        if not is_causal:
            return None
        return call.part.positions().unsqueeze(1) >= torch.arange(key.shape[2])
    if is_causal:
        call.refuse("has a mask and is_causal, which torch does not allow")
    own = Placement(mask.dim() - 2)
    if placement_of(mask) not in (None, own):
        call.refuse("has a mask whose keys are divided by positions")
    return call.aligned(mask, own, mask.dim())
