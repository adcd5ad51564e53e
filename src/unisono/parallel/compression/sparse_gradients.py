"""Exchange that averages sparse gradients: each rank gathers all ranks' indices and values."""

from __future__ import annotations

import torch

from unisono.controller import Controller, Handle
from unisono.parallel.data_parallelism.gradient_exchange import GradientExchange, PendingAverage


class SparseExchange(GradientExchange):
    """Averages sparse gradients, whose numbers of rows may differ between ranks."""

    def __init__(self, controller: Controller, prefix: str = "") -> None:
        """The names of the tensors that the controller receives begin with `prefix`."""
        self._controller = controller
        self._prefix = prefix

    def begin(self, name: str, grad: torch.Tensor) -> PendingAverage:
        """Submits the nonzero rows of the gradient. Converts a dense gradient to a sparse one."""
        sparse = (grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)).coalesce()
        gather, name = self._controller.all_gather, self._prefix + name
        return _SparseAverage(
            gather(f"{name}.indices", sparse.indices().t().contiguous()),
            gather(f"{name}.values", sparse.values()),
            grad.shape,
            self._controller.size,
        )


class _SparseAverage(PendingAverage):
    def __init__(self, indices: Handle, values: Handle, shape: torch.Size, ranks: int) -> None:
        self._indices = indices
        self._values = values
        self._shape = shape
        self._ranks = ranks

    def finish(self, *, used: bool) -> torch.Tensor:
        indices, values = self._indices.wait(), self._values.wait()
        total = torch.sparse_coo_tensor(
            indices.t(), values, tuple(self._shape), check_invariants=False
        )
        average: torch.Tensor = total.coalesce() / self._ranks
        return average


def sparse_zero(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a sparse gradient with no rows, in the shape of a parameter."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64),
        parameter.new_empty((0, *parameter.shape[1:])),
        tuple(parameter.shape),
        check_invariants=False,
    )
