"""PowerSGD: an exchange that averages gradients as products of two thin matrices.

Source: T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization", NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from unisono.controller import Controller, Handle
from unisono.parallel.compression.error_feedback_exchange import all_finite, working_dtype
from unisono.parallel.data_parallelism.gradient_exchange import (
    DenseExchange,
    GradientExchange,
    PendingAverage,
    TensorState,
)

_ERROR, _Q, _PASSES = "error", "q", "passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
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


class PowerSGDExchange(GradientExchange):
    """Averages matrices by one power iteration per backward pass, other gradients uncompressed."""

    def __init__(self, controller: Controller, prefix: str, settings: PowerSGD) -> None:
        self.settings = settings
        self._controller = controller
        self._prefix = prefix
        self._dense = DenseExchange(controller, prefix)
        self._state: TensorState = {}

    def begin(self, name: str, grad: torch.Tensor) -> PendingAverage:
        """Submits P of the gradient plus the error that earlier backward passes left."""
        columns = self.columns(grad)
        if columns == 0:
            return self._dense.begin(name, grad)
        if self._passes(name) < self.settings.dense_passes:
            return _DensePass(self, name, self._dense.begin(name, grad))
        matrix = grad.detach().to(working_dtype(grad))
        error = self._state.get(name, {}).get(_ERROR)
        if error is not None:
            matrix = matrix + error
        matrix = matrix.reshape(grad.shape[0], -1)
        return _LowRankAverage(self, name, grad, matrix, self._first_q(name, matrix, columns))

    def columns(self, grad: torch.Tensor) -> int:
        """Returns the number of columns of P and Q; 0 if the gradient is sent uncompressed."""
        if grad.dim() < 2 or grad.numel() == 0 or not grad.is_floating_point():
            return 0
        n, m = grad.shape[0], grad.numel() // grad.shape[0]
        columns = min(self.settings.rank, n, m)
        return columns if (n + m) * columns * self.settings.min_compression < n * m else 0

    def submit(self, name: str, matrix: torch.Tensor) -> Handle:
        """Submits a matrix to be averaged in place."""
        return self._controller.all_reduce(self._prefix + name, matrix, "avg")

    def keep(self, name: str, **tensors: torch.Tensor) -> None:
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


class _LowRankAverage(PendingAverage):
    """The pending average of a gradient: first the average of P, then of Q."""

    def __init__(
        self,
        exchange: PowerSGDExchange,
        name: str,
        grad: torch.Tensor,
        matrix: torch.Tensor,
        q: torch.Tensor,
    ) -> None:
        self._exchange = exchange
        self._name = name
        self._grad = grad
        self._matrix = matrix
        self._p = matrix @ q
        self._handle = exchange.submit(f"{name}.P", self._p)

    def wait_first_round(self) -> None:
        self._handle.wait()

    def begin_second_round(self) -> None:
        self._p = _orthonormal(self._p)
        self._q = self._matrix.t() @ self._p
        self._handle = self._exchange.submit(f"{self._name}.Q", self._q)

    def finish(self, *, used: bool) -> torch.Tensor:
        self._handle.wait()
        product = self._p @ self._q.t()
        # All ranks have the same product, so all take the same branch.
        if used and all_finite(product):
            error = (self._matrix - product).view(self._grad.shape)
            self._exchange.keep(self._name, error=error, q=self._q)
        return product.view(self._grad.shape).to(self._grad.dtype)


class _DensePass(PendingAverage):
    """The pending average of an uncompressed gradient in one of the initial passes."""

    def __init__(self, exchange: PowerSGDExchange, name: str, dense: PendingAverage) -> None:
        self._exchange = exchange
        self._name = name
        self._dense = dense

    def finish(self, *, used: bool) -> torch.Tensor:
        average = self._dense.finish(used=used)
        if used:
            self._exchange.keep(self._name)
        return average


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Returns as many orthonormal columns as `matrix` has, with the same span as its columns."""
    q: torch.Tensor = torch.linalg.qr(matrix).Q
    return q
