"""The loss of a batch that is computed in parts: the sum of sums over the sum of weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch

from unisono.parallel.run.known_losses import KnownLoss, known_loss
from unisono.parallel.run.loss_calls import called_loss
from unisono.parallel.run.unused_output import unused

Loss = Callable[[Any, torch.Tensor], Any]
"""Returns the mean loss of outputs and targets, or a pair (sum, weight)."""

_EXAMPLE = "return (sum, weight), for example (losses[mask].sum(), mask.sum())"


class BatchLoss:
    """Computes what the output of each part of a batch adds to the loss of the whole batch.

    The weight of a loss of torch depends on the targets alone, which all ranks have, so its parts
    are divided by the weight of the batch at once. A loss that returns pairs (sum, weight) is
    divided at the end of the step, after the ranks have added their weights.
    """

    def __init__(self, loss: Loss, *, is_balanced: bool, cut: int) -> None:
        """`is_balanced`: the model adds balance losses to its gradients. `cut`: the number of
        dimensions of the targets that are cut into parts.

        Raises `ValueError` for losses of torch that are neither a mean nor a sum.
        """
        self._loss, self._is_balanced, self._cut = loss, is_balanced, cut
        self._known: KnownLoss | None = known_loss(loss)
        self._scale, self._parts, self._elements = 1.0, 1, 1
        self.weight = 0.0
        """The sum of the weights that the loss returned in this step."""
        self.error: Exception | None = None
        """The first error of the loss in this step, which the other ranks must learn."""

    def begin(self, targets: torch.Tensor, *, parts: int) -> None:
        """Begins a step with the targets of the whole batch, which is computed in parts."""
        self.restart()
        self._parts = parts
        self._elements = max(targets.numel(), 1)
        # read again in each step, since a program may change the options of a module
        self._known = known_loss(self._loss) if parts > 1 else None
        if self._known is not None:
            weight = 1.0 if self._known.is_sum else self._known.weight(targets)
            self._scale = 1 / weight if weight else torch.nan

    def restart(self) -> None:
        """Forgets what passes so far in this step have added."""
        self.weight, self.error = 0.0, None

    def part(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        """Returns what this output adds to the loss of the batch, for `backward`.

        If the loss raises an error, returns zero and keeps the error: other ranks wait for the
        collectives of this rank's backward pass.
        """
        try:
            return self._part(output, targets)
        except Exception as error:
            self.error = self.error or error
            return unused(output)

    def _part(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        if self._parts > 1 and len(targets) == 0:
            return unused(output)
        if self._known is not None:
            self._known.check(output, targets, cut=self._cut)
            total = self._known.sum_of(output, targets)
            return total * self._scale if self._scale == self._scale else _without_weight(total)
        if self._parts == 1:
            found = self._loss(output, targets)
            if not _is_pair(found):
                return cast(torch.Tensor, found)
            total, weight = found
            return cast(torch.Tensor, total / weight) if weight != 0 else _without_weight(total)
        share = targets.numel() / self._elements
        found = called_loss(self._loss, output, targets, cut=self._cut, share=share)
        return self._add_pair(*self._checked(found), output)

    def _checked(self, found: Any) -> tuple[torch.Tensor, float]:
        if not _is_pair(found):
            raise ValueError(
                f"loss: a batch is computed in {self._parts} parts, and the loss of the batch "
                f"cannot be known from what the loss of a part returned ({type(found).__name__}); "
                f"{_EXAMPLE}, or pass a loss of torch.nn or torch.nn.functional"
            )
        total, weight = found
        if isinstance(weight, torch.Tensor) and weight.requires_grad:
            raise ValueError(
                "loss: the weight of (sum, weight) depends on parameters, so the gradient of the "
                "mean is not a sum over parts; expected a weight computed from the targets"
            )
        if self._is_balanced:
            raise ValueError(
                "loss: the balance losses of experts need a loss whose weight depends on the "
                "targets alone; pass CrossEntropy(vocab), or a loss of torch.nn"
            )
        return torch.as_tensor(total), float(weight)

    def _add_pair(self, total: torch.Tensor, weight: float, output: Any) -> torch.Tensor:
        if total.dim() or not total.is_floating_point():
            raise ValueError(
                f"loss: expected (sum, weight) of two numbers, got a sum of shape "
                f"{tuple(total.shape)} and type {total.dtype}"
            )
        self.weight += weight
        total = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
        if not total.requires_grad:
            if weight != 0:
                raise ValueError(
                    "loss: the sum of (sum, weight) does not depend on the model's output, so it "
                    "has no gradient; expected a sum that was not detached"
                )
            # for example 0.0 for a part without valid targets
            total = total + unused(output)
        return total / self._elements  # about the mean, so that gradients of float16 fit

    def factor(self, weight: float) -> float:
        """Returns the factor of the step's loss and gradients: 0 for pairs without weight.

        `weight`: the sum of `weight` over all ranks.
        """
        if self._parts == 1 or self._known is not None:
            return 1.0
        return self._elements / weight if weight != 0 else 0.0

    def mean(self, total: float, factor: float) -> float:
        """Returns the loss of the batch from the sum over all ranks: NaN for pairs without weight,
        as torch's losses without valid targets."""
        return total * factor if factor != 0 else math.nan


def _without_weight(total: torch.Tensor) -> torch.Tensor:
    """Returns NaN with gradients of zero, as torch's losses without valid targets."""
    return total * 0 + torch.nan


def _is_pair(found: Any) -> bool:
    return isinstance(found, (tuple, list)) and len(found) == 2
