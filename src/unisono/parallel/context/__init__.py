"""Attention over a sequence that the ranks of `cp` divide.

Each rank holds the part of the sequence that `zigzag_part` names. `ContextAttention` computes the
attention of these positions to the whole sequence, by one of `CONTEXT_KINDS`.
"""

from unisono.parallel.context.context_attention import CONTEXT_KINDS, ContextAttention
from unisono.parallel.context.zigzag import zigzag_part

__all__ = ["CONTEXT_KINDS", "ContextAttention", "zigzag_part"]
