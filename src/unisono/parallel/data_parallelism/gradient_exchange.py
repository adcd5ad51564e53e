"""The exchanges that average gradients: dense ones, and sparse ones."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch

from unisono.controller import Controller, Handle

TensorState = dict[str, dict[str, torch.Tensor]]
"""State of an exchange from one pass to the next: named tensors for each parameter name."""

Rounds = Generator[Handle | None, bool, torch.Tensor]
"""The average of one gradient, step by step.

It submits the gradient, and yields None. If it needs two rounds, it submits the first one, yields
its handle, and after that submits the second one and yields None. This last `yield` returns `used`
(see `PendingAverage.finish`). Then it waits, and returns the average."""


class PendingAverage:
    """A pending average of one gradient. It may use the gradient's memory until `finish`."""

    __slots__ = ("_rounds", "first_round")

    def __init__(self, rounds: Rounds) -> None:
        """Submits the first round, or the only one."""
        self._rounds = rounds
        self.first_round = next(rounds)
        """The handle of the first of two rounds, until the second one begins."""

    def begin_second_round(self) -> None:
        """Submits the second of two rounds."""
        self.first_round = next(self._rounds)

    def finish(self, *, used: bool) -> torch.Tensor:
        """Waits for the average, and returns it in the shape and type of the gradient.

        `used`: True if at least one rank used the parameter and no rank failed; equal on all ranks.
        If it is False, the caller drops the average, and the state of the exchange does not change.
        """
        try:
            self._rounds.send(used)
        except StopIteration as end:
            found: torch.Tensor = end.value
            return found
        raise AssertionError("the rounds of an average end after their last yield")


class GradientExchange:
    """Averages gradients over all ranks, uncompressed and in place; each has its parameter's name.

    A subclass sends fewer bytes for some gradients.
    """

    def __init__(self, controller: Controller, prefix: str = "") -> None:
        """The names of the tensors that the controller receives begin with `prefix`."""
        self._controller, self._prefix = controller, prefix

    def begin(self, name: str, grad: torch.Tensor) -> PendingAverage:
        """Submits this rank's gradient without waiting. All ranks must submit the same names."""
        return PendingAverage(self.rounds(name, grad))

    def rounds(self, name: str, grad: torch.Tensor) -> Rounds:
        """Averages a gradient."""
        handle = self._controller.all_reduce(self._prefix + name, grad, "avg")
        yield None
        handle.wait()
        return grad

    @property
    def keeps_state(self) -> bool:
        """True if the averages of a backward pass depend on earlier backward passes."""
        return False

    def state(self) -> TensorState:
        """Returns the state by parameter name. Later backward passes do not change its tensors."""
        return {}

    def load_state(self, state: TensorState) -> None:
        """Replaces the state by one that `state` returned on this rank."""


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


def average_all(
    exchange: GradientExchange, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the averages of all tensors, by name. May overwrite the tensors."""
    pending = {name: exchange.begin(name, tensor) for name, tensor in tensors.items()}
    finish_first_rounds(list(pending.values()))
    return {name: each.finish(used=True) for name, each in pending.items()}


def finish_first_rounds(pending: Sequence[PendingAverage]) -> None:
    """Waits for the first rounds of averages that have two, then begins their second rounds.

    The second rounds begin together, so that the controller can fuse them.
    """
    first = [(each, each.first_round) for each in pending if each.first_round is not None]
    for _, handle in first:
        handle.wait()
    for each, _ in first:
        each.begin_second_round()
