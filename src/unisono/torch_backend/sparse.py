"""all_reduce of sparse tensors: gathers every rank's entries, then adds them locally."""

from __future__ import annotations

from typing import Any

import torch

from unisono.errors import UnsupportedError
from unisono.types import ReduceOp


def all_reduce_sparse(comm: Any, tensor: torch.Tensor, reduction: ReduceOp) -> None:
    """Sums or averages a COO tensor over all ranks, in place.

    Sends only stored entries: with k ranks that have z entries each, a rank receives k*z entries.
    Blocks even with async_op=True, since the ranks must know the lengths before they send entries.
    """
    if reduction not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UnsupportedError(
            f"all_reduce of a sparse tensor supports sum and avg, not {reduction.name.lower()}"
        )
    local = tensor.detach().coalesce()
    indices = local.indices().contiguous()
    values = local.values().contiguous()
    counts = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(torch.tensor([indices.size(1)]), counts)
    lengths = counts.tolist()

    all_indices = [indices.new_empty((indices.size(0), length)) for length in lengths]
    all_values = [values.new_empty((length, *values.shape[1:])) for length in lengths]
    comm.all_gather(indices, all_indices)
    comm.all_gather(values, all_values)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, dim=1), torch.cat(all_values), tensor.shape, check_invariants=False
    ).coalesce()
    if reduction == ReduceOp.AVG:
        total = total / comm.size
    with torch.no_grad():
        tensor.copy_(total)
