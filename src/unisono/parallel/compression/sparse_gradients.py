"""Exchange that averages sparse gradients: each rank gathers all ranks' indices and values."""

from __future__ import annotations

import torch

from unisono.parallel.data_parallelism.gradient_exchange import GradientExchange, Rounds


class SparseExchange(GradientExchange):
    """Averages sparse gradients, whose numbers of rows may differ between ranks."""

    def rounds(self, name: str, grad: torch.Tensor) -> Rounds:
        """Gathers the nonzero rows of the gradients. Converts a dense gradient to a sparse one."""
        sparse = (grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)).coalesce()
        gather, name, shape = self._controller.all_gather, self._prefix + name, tuple(grad.shape)
        indices = gather(f"{name}.indices", sparse.indices().t().contiguous())
        values = gather(f"{name}.values", sparse.values())
        yield None
        total = torch.sparse_coo_tensor(
            indices.wait().t(), values.wait(), shape, check_invariants=False
        )
        return total.coalesce() / self._controller.size


def sparse_zero(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a sparse gradient with no rows, in the shape of a parameter."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64),
        parameter.new_empty((0, *parameter.shape[1:])),
        tuple(parameter.shape),
        check_invariants=False,
    )
