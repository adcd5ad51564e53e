"""Attention over a sequence that the ranks of `cp` divide.

Each rank holds the part of the sequence that `zigzag_part` names; `in_natural_order` joins the
parts. `ContextAttention` computes the attention of these positions to the whole sequence, by one of
`CONTEXT_KINDS`.
"""

from unisono.parallel.context.context_attention import CONTEXT_KINDS, ContextAttention
from unisono.parallel.context.zigzag import in_natural_order, zigzag_part

__all__ = ["CONTEXT_KINDS", "ContextAttention", "in_natural_order", "zigzag_part"]
