"""Sparse gradients, averaged by gathering every rank's indices and values."""

from __future__ import annotations

import torch
from torch import nn

from unisono.controller import Controller


class SparseExchange:
    """Averages sparse gradients, of any number of rows on each rank."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def average(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Returns the average of all ranks' gradients, coalesced. No gradient counts as zero."""
        mine = _coalesced(parameter)
        indices = self._controller.all_gather(f"{name}.indices", mine.indices().t().contiguous())
        values = self._controller.all_gather(f"{name}.values", mine.values())
        total = torch.sparse_coo_tensor(
            indices.wait().t(), values.wait(), tuple(parameter.shape), check_invariants=False
        )
        average: torch.Tensor = total.coalesce() / self._controller.size
        return average


def _coalesced(parameter: nn.Parameter) -> torch.Tensor:
    grad = parameter.grad
    if grad is None:
        grad = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64),
            parameter.new_empty((0, *parameter.shape[1:])),
            tuple(parameter.shape),
            check_invariants=False,
        )
    elif not grad.is_sparse:
        grad = grad.to_sparse(1)
    return grad.coalesce()
