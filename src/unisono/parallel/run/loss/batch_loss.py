"""The loss of a batch that is computed in parts: the sum of sums over the sum of weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from unisono.parallel.run.batch.batch_parts import Microbatch
from unisono.parallel.run.batch.batch_tree import BatchTree, unused
from unisono.parallel.run.loss.known_losses import KnownLoss, known_loss, widened
from unisono.parallel.run.loss.loss_calls import called_loss
from unisono.parallel.run.loss.own_loss import LossWatch, TracedLoss, model_loss

StatedWeight = Callable[[Any, Any], Any]
"""Returns the weight of a part of a batch from its output and its targets."""

_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def stated_weight(function: Callable[..., Any]) -> StatedWeight:
    """Returns the weight of a part's mean loss by a function of the batch, or of (output, batch).

    Raises `ValueError` for a function with another number of arguments.

    >>> stated_weight(lambda batch: len(batch))(None, [1, 2])
    2
    >>> stated_weight(lambda output, batch: output + len(batch))(3, [1, 2])
    5
    """
    expected = "weight: expected a function of the batch, or of (output, batch), got"
    if not callable(function):
        raise ValueError(f"{expected} {function!r}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return lambda _, batch: function(batch)
    needed = [each for each in parameters if each.kind in _KINDS and each.default is each.empty]
    if len(needed) not in (1, 2):
        raise ValueError(f"{expected} one that needs {len(needed)} arguments")
    return function if len(needed) == 2 else lambda _, batch: function(batch)


Loss = Callable[[Any, Any], Any]
"""Returns the mean loss of outputs and targets, or of outputs and a batch; or a pair (sum,
weight)."""

_EXAMPLE = "return (sum, weight), for example (losses[mask].sum(), mask.sum())"


class BatchLoss:
    """Computes what the output of each part of a batch adds to the loss of the whole batch.

    The weight of a loss of torch depends on the targets alone, which all ranks have, so its parts
    are divided by the weight of the batch at once. Other losses have pairs (sum, weight), and are
    divided at the end of the step, after the ranks have added their weights.
    """

    def __init__(
        self,
        loss: Loss,
        *,
        is_balanced: bool,
        cut: int,
        weight: StatedWeight | None,
        stages: Sequence[nn.Module],
    ) -> None:
        """`is_balanced`: the model adds balance losses to its gradients. `cut`: the number of
        dimensions of the targets that are cut into parts. `weight`: that of a part's mean loss.
        `stages`: the modules that may compute the loss.

        Raises `ValueError` for losses of torch that are neither a mean nor a sum.
        """
        self._loss, self._is_balanced, self._cut = loss, is_balanced, cut
        self._given = weight
        known_loss(loss)
        self._known: KnownLoss | None = None
        self._watch = LossWatch(stages) if loss is model_loss and weight is None else None
        self._scale, self._parts, self._elements = 1.0, 1, 1.0
        self.weight = 0.0
        """The sum of the weights that the loss returned in this step."""
        self.error: Exception | None = None
        """The first error of the loss in this step, which the other ranks must learn."""

    @property
    def is_of_model(self) -> bool:
        """True if the model computes its loss itself."""
        return self._loss is model_loss

    @property
    def takes_batch(self) -> bool:
        """True if the loss, or its weight, is computed from the batch."""
        return self._loss is not model_loss or self._given is not None

    def known_weight(self, batch: BatchTree, *, is_pair: bool, parts: int) -> float:
        """Returns the weight of the targets of a batch for a loss of torch; 0 for other losses.

        `parts`: the number of parts in which the whole batch is computed. Raises `ValueError` if
        the targets of a loss of torch are not known.
        """
        # read again in each step, since a program may change the options of a module
        known = known_loss(self._loss)
        if known is not None and not is_pair:
            raise ValueError(
                "loss: a loss of torch needs to know the targets of the batch; call step(inputs, "
                "targets), or pass a function of the output and the batch, such as lambda output, "
                "batch: cross_entropy(output.logits, batch['labels'])"
            )
        self._known = known if parts > 1 and self._given is None else None
        if self._known is None or self._known.is_sum:
            return 0.0
        return float(self._known.weight(batch.tensors[1]))

    def begin(self, *, parts: int, weight: float, elements: float) -> None:
        """Begins a step with a batch that is computed in parts.

        `weight`: the known weight of the whole batch; `elements`: about the number of its targets.
        """
        self.restart()
        self._parts, self._elements = parts, max(elements, 1.0)
        if self._known is not None:
            whole = 1.0 if self._known.is_sum else weight
            self._scale = 1 / whole if whole else torch.nan

    def restart(self) -> None:
        """Forgets what passes so far in this step have added."""
        self.weight, self.error = 0.0, None

    def watching(self) -> AbstractContextManager[None] | None:
        """Returns the context of a forward pass, which finds the weight of the model's own loss;
        None for other losses."""
        if self._watch is None or self._parts == 1:
            return None
        return self._watch.passing()

    def part(self, output: Any, part: Microbatch) -> torch.Tensor:
        """Returns what this output adds to the loss of the batch, for `backward`.

        If the loss raises an error, returns zero and keeps the error: other ranks wait for the
        collectives of this rank's backward pass.
        """
        try:
            return self._part(output, part)
        except Exception as error:
            self.error = self.error or error
            return unused(output)

    def _part(self, output: Any, part: Microbatch) -> torch.Tensor:
        if self._parts > 1 and part.own == 0:
            return unused(output)
        if self._known is not None:
            self._known.check(output, part.targets, cut=self._cut)
            total = self._known.sum_of(output, part.targets)
            return total * self._scale if self._scale == self._scale else _without_weight(total)
        if self._parts == 1:
            found = self._alone(output, part)
            if not _is_pair(found):
                return cast(torch.Tensor, found)
            total, weight = found
            return cast(torch.Tensor, total / weight) if weight != 0 else _without_weight(total)
        if self._given is not None or self._loss is model_loss:
            return self._weighted(output, part)
        found = called_loss(
            self._loss, output, part.targets, cut=self._cut, share=part.share, rows=part.own
        )
        return self._add_pair(*self._checked(found), output)

    def _alone(self, output: Any, part: Microbatch) -> Any:
        """Returns the loss of a batch of one part."""
        if isinstance(output, TracedLoss):
            return output.loss
        return self._loss(output, part.targets)

    def _weighted(self, output: Any, part: Microbatch) -> torch.Tensor:
        """Returns what a mean adds whose weight the program states, or torch's loss in it."""
        loss = self._alone(output, part)
        if _is_pair(loss):
            raise ValueError(
                "loss: returned a pair, which states a weight, as the argument weight does; pass "
                "one of them"
            )
        loss = torch.as_tensor(loss)
        weight = self._weight_of(loss, output, part)
        if weight is None:  # a sum is divided by 1, of which this is the share of a part
            pair: tuple[torch.Tensor, Any] = loss, part.share
        elif float(weight) == 0:  # the mean over nothing is NaN
            pair = unused(output), 0.0
        else:
            pair = widened(loss) * float(weight), weight
        return self._add_pair(*self._checked(pair), output)

    def _weight_of(self, loss: torch.Tensor, output: Any, part: Microbatch) -> Any:
        """Returns the weight of a part's mean; None for a sum.

        Raises `ValueError` if it is not known.
        """
        if self._given is not None:
            return self._given(output, part.targets)
        if isinstance(output, TracedLoss):
            if output.problem is not None:
                raise ValueError(output.problem)
            return output.weight
        assert self._watch is not None
        known, targets = self._watch.known(loss)
        return None if known.is_sum else known.weight(targets)

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
        total = widened(total)
        if not total.requires_grad and torch.is_grad_enabled():
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


def _without_weight(total: torch.Tensor) -> torch.Tensor:
    """Returns NaN with gradients of zero, as torch's losses without valid targets."""
    return total * 0 + torch.nan


def _is_pair(found: Any) -> bool:
    return isinstance(found, (tuple, list)) and len(found) == 2
