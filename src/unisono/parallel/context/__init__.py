"""Context parallelism (`cp`): attention over a sequence that is split across ranks.

Each rank holds the positions that `zigzag_part` returns; `in_natural_order` joins the positions of
all ranks to the whole sequence. `ContextAttention` computes the attention of a rank's positions to
the whole sequence, by an exchange of one of the kinds `CONTEXT_KINDS`. `all_gather` gathers a
tensor.
"""

from unisono.parallel.context.context_attention import CONTEXT_KINDS, ContextAttention
from unisono.parallel.context.gathered_attention import all_gather
from unisono.parallel.context.zigzag import in_natural_order, zigzag_part

__all__ = ["CONTEXT_KINDS", "ContextAttention", "all_gather", "in_natural_order", "zigzag_part"]
