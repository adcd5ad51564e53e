"""Collectives on one tensor for all ranks, by their names in torch 2.13. Older versions have them
by other names, which newer versions deprecate.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as dist


def all_gather_single(output: Any, part: Any, group: Any = None) -> None:
    """Gathers every rank's `part` in `output`, in rank order."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)


def reduce_scatter_single(output: Any, whole: Any, op: Any = None, group: Any = None) -> None:
    """Reduces `whole` over all ranks with `op` (None: a sum); rank r gets share r in `output`."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, whole, dist.ReduceOp.SUM if op is None else op, group=group)
