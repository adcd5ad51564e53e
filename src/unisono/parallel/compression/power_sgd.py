"""PowerSGD: an exchange that averages gradients as products of two thin matrices.

Source: T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization", NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from unisono.controller import Controller
from unisono.parallel.compression.error_feedback_exchange import all_finite, working_dtype
from unisono.parallel.data_parallelism.compression_state import Compression
from unisono.parallel.data_parallelism.gradient_exchange import (
    GradientExchange,
    Rounds,
    TensorState,
)

_ERROR, _Q, _PASSES = "error", "q", "passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(Compression):
    """Sends each gradient, as an n x m matrix, as P (n x rank) and Q (m x rank).

    The first dimension of a parameter gives n, the others m. Both matrices can be summed, so the
    bytes do not grow with the number of ranks. The averages of P and Q need one round each: P is
    sent while backward runs, Q at its end. Gradients of rank at most `rank` are exact.

    >>> PowerSGD(rank=2).min_compression
    2.0
    """

    rank: int = 4
    """Number of columns of P and Q, reduced to n or m where these are smaller."""
    min_compression: float = 2.0
    """Ratio n m / ((n + m) rank) that a gradient must exceed to be compressed."""
    dense_passes: int = 0
    """Number of initial backward passes whose gradients are sent uncompressed."""
    error_feedback: bool = True
    """True if the difference between gradient and product is added to the next gradient."""
    warm_start: bool = True
    """True if a backward pass starts with the previous pass's Q instead of random numbers."""
    seed: int = 0
    """Seed of the random numbers; equal on all ranks."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank: expected 1 or more columns, got {self.rank}")
        if not self.min_compression > 0:
            raise ValueError(f"min_compression: expected above 0, got {self.min_compression}")
        if self.dense_passes < 0:
            raise ValueError(f"dense_passes: expected 0 or more passes, got {self.dense_passes}")

    def exchange(self, controller: Controller, prefix: str) -> GradientExchange:
        """Returns an exchange of two thin matrices for each gradient."""
        return PowerSGDExchange(controller, prefix, self)


class PowerSGDExchange(GradientExchange):
    """Averages matrices by one power iteration per backward pass, other gradients uncompressed."""

    def __init__(self, controller: Controller, prefix: str, settings: PowerSGD) -> None:
        super().__init__(controller, prefix)
        self.settings = settings
        self._state: TensorState = {}

    def rounds(self, name: str, grad: torch.Tensor) -> Rounds:
        """Averages P of the gradient plus the error that earlier backward passes left, then Q."""
        columns = self.columns(grad)
        if columns == 0:
            return (yield from super().rounds(name, grad))
        all_reduce, full_name = self._controller.all_reduce, self._prefix + name
        if self._passes(name) < self.settings.dense_passes:
            handle = all_reduce(full_name, grad, "avg")
            used = yield None
            handle.wait()
            if used:
                self._keep(name)
            return grad
        matrix = grad.detach().to(working_dtype(grad))
        error = self._state.get(name, {}).get(_ERROR)
        if error is not None:
            matrix = matrix + error
        matrix = matrix.reshape(grad.shape[0], -1)
        p = matrix @ self._first_q(name, matrix, columns)
        yield all_reduce(f"{full_name}.P", p, "avg")
        p = _orthonormal(p)
        q = matrix.t() @ p
        handle = all_reduce(f"{full_name}.Q", q, "avg")
        used = yield None
        handle.wait()
        product = p @ q.t()
        # All ranks have the same product, so all take the same branch.
        if used and all_finite(product):
            self._keep(name, error=(matrix - product).view(grad.shape), q=q)
        return product.view(grad.shape).to(grad.dtype)

    def columns(self, grad: torch.Tensor) -> int:
        """Returns the number of columns of P and Q; 0 if the gradient is sent uncompressed."""
        if grad.dim() < 2 or grad.numel() == 0 or not grad.is_floating_point():
            return 0
        n, m = grad.shape[0], grad.numel() // grad.shape[0]
        columns = min(self.settings.rank, n, m)
        return columns if (n + m) * columns * self.settings.min_compression < n * m else 0

    def _keep(self, name: str, **tensors: torch.Tensor) -> None:
        """Keeps the error and Q of a parameter for its next backward pass, and counts this pass."""
        wanted = {_ERROR: self.settings.error_feedback, _Q: self.settings.warm_start}
        kept = {what: tensor for what, tensor in tensors.items() if wanted[what]}
        self._state[name] = {**kept, _PASSES: torch.tensor(self._passes(name) + 1)}

    @property
    def keeps_state(self) -> bool:
        """True: the exchange always keeps the number of backward passes of each parameter."""
        return True

    def state(self) -> TensorState:
        """Returns the error, Q and number of passes of each parameter.

        The error is this rank's own; Q and the number of passes are equal on all ranks.
        """
        return {name: dict(tensors) for name, tensors in self._state.items()}

    def load_state(self, state: TensorState) -> None:
        """Replaces the errors, Q and numbers of passes of this rank."""
        self._state = {
            name: {what: tensor.clone() for what, tensor in found.items()}
            for name, found in state.items()
        }

    def _passes(self, name: str) -> int:
        found = self._state.get(name)
        return 0 if found is None else int(found[_PASSES])

    def _first_q(self, name: str, matrix: torch.Tensor, columns: int) -> torch.Tensor:
        q = self._state.get(name, {}).get(_Q)
        if q is None or q.shape != (matrix.shape[1], columns):
            seed = zlib.crc32(f"{self.settings.seed} {name} {self._passes(name)}".encode())
            q = torch.randn(
                (matrix.shape[1], columns),
                generator=torch.Generator().manual_seed(seed),
                dtype=matrix.dtype,
            )
        return _orthonormal(q)


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Returns as many orthonormal columns as `matrix` has, with the same span as its columns."""
    q: torch.Tensor = torch.linalg.qr(matrix).Q
    return q
