"""The end of a step: what ranks sum and compare of losses, norms and uses of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import distributed as dist

from unisono.parallel.divisible.interfaces import Balanced
from unisono.parallel.precision import LossScaler
from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.loss.batch_loss import BatchLoss
from unisono.parallel.run.parameters.gradient_hooks import GradientHooks
from unisono.parallel.run.run_failure import different_calls
from unisono.parallel.run.step.step_agreement import StepAgreement, small_sum
from unisono.parallel.run.step.step_checks import StepChecks


class ParameterUses:
    """Counts the ranks that used each trained parameter of the whole model in a step.

    A parameter that no rank used has no gradient, as in one process: the optimizer skips it.
    Compares the calls of modules that gather parameters, too.
    """

    def __init__(self, model: DividedModel) -> None:
        self._mesh, self._calls, self._optimizers = model.mesh, model.calls, model.optimizers
        places = {name: place for place, name in enumerate(model.names)}
        self._count, self._sets = len(places), model.sets
        self._places = [places[each.name] for each in model.trained]
        """The place of each parameter of this rank among those of the whole model."""

    def counts(self) -> list[float]:
        """Returns the values of this rank, which are to be added over all ranks.

        1.0 for each parameter that this rank used in the step, else 0.0. Then, for each place in
        the pipeline, the checksum of the calls and its square.
        """
        found = [0.0] * (self._count + 2 * self._mesh.layout.pp)
        used = (flag for each in self._sets for flag in each.used())
        for place, flag in zip(self._places, used, strict=True):
            found[place] = float(flag)
        checksum, place = self._calls.checksum(), self._count + 2 * self._mesh.coordinates["pp"]
        found[place : place + 2] = checksum, checksum**2
        return found

    def skip_unused(self, counts: Sequence[float]) -> None:
        """Makes the optimizers skip parameters that no rank used.

        `counts`: the sum of `counts()` over all ranks. Raises `ValueError` if ranks with the same
        parameters have called modules in different orders.
        """
        counts, checksums = counts[: self._count], counts[self._count :]
        ranks = dist.get_world_size() // self._mesh.layout.pp
        for total, squares in zip(checksums[::2], checksums[1::2], strict=True):
            if ranks * int(squares) != int(total) ** 2:  # equal only if all checksums are equal
                raise ValueError(different_calls(self._mesh.layout))
        if all(counts):
            return
        unused = [counts[place] == 0 for place in self._places]
        for each in self._sets:
            own, unused = unused[: len(each.held)], unused[len(each.held) :]
            if any(own):
                each.skip(own, self._optimizers)


_NORM_EPSILON = 1e-6  # added to the norm, as by torch.nn.utils.clip_grad_norm_


class StepEnd:
    """Makes the gradients those of the whole batch, and its loss known on all ranks."""

    def __init__(
        self,
        model: DividedModel,
        loss: BatchLoss,
        agreement: StepAgreement,
        checks: StepChecks,
        balanced: Sequence[Balanced],
        scaler: LossScaler,
    ) -> None:
        """`balanced`: the modules of this rank with balance losses. `scaler`: that of the losses
        and gradients of a step."""
        self._sets, self._mesh, self._loss = model.sets, model.mesh, loss
        self._agreement, self._checks, self._balanced = agreement, checks, balanced
        self._uses, self._scaler = ParameterUses(model), scaler

    def call_hooks(self, hooks: GradientHooks, *, is_failed: bool) -> bool:
        """Calls the hooks of parameters; returns True if it has scaled the gradients. Collective.

        `is_failed`: this rank has an error.
        """
        return hooks.call(
            is_failed=is_failed,
            weight=self._own_weight(),
            scale=lambda weight: self._multiply(self._loss.factor(weight) / self._scaler.factor),
        )

    def trained(
        self,
        losses: Sequence[torch.Tensor],
        error: Exception | None,
        *,
        clip: float | None,
        is_scaled: bool,
    ) -> tuple[torch.Tensor, float]:
        """Sums the loss and the squared norm over all ranks, clips gradients, returns the loss and
        the norm. Collective.

        The same exchange finds ranks that disagree, and the parameters that no rank used; their
        gradients become None. `error`: that of this rank. `is_scaled`: the gradients are those of
        the batch's loss.
        """
        squares = sum(each.squares() for each in self._sets)
        self._agreement.error = error
        own = [self._own_loss(losses), squares, self._own_weight()]
        agreed = self._agreement.counts()
        numbers = [*own, *agreed, *self._uses.counts()]
        total, squares, weight, *counts = small_sum(numbers, self._mesh.all_ranks)
        self._agreement.require(counts[: len(agreed)])
        self._uses.skip_unused(counts[len(agreed) :])
        self._checks.note_arrays()
        factor = self._loss.factor(weight)
        rest = 1.0 if is_scaled else factor / self._scaler.factor
        norm = math.sqrt(squares) * abs(rest)
        clipping = 1.0 if clip is None else clip / (norm + _NORM_EPSILON)
        self._multiply(min(clipping, 1) * rest)
        return self._mean(total / self._scaler.factor, factor), norm

    def evaluated(self, losses: Sequence[torch.Tensor], error: Exception | None) -> torch.Tensor:
        """Returns the loss over all ranks. Collective. `error`: that of this rank."""
        self._agreement.error = error
        own = [self._own_loss(losses), self._own_weight(), *self._agreement.counts()]
        total, weight, *agreed = small_sum(own, self._mesh.all_ranks)
        self._agreement.require(agreed)
        return self._mean(total, self._loss.factor(weight))

    def _mean(self, total: float, factor: float) -> torch.Tensor:
        """Returns the loss of the batch from the sum over all ranks: NaN for pairs without weight,
        as torch's losses without valid targets."""
        return torch.tensor(total * factor if factor != 0 else math.nan, dtype=torch.float64)

    def _multiply(self, factor: float) -> None:
        if factor != 1:
            for each in self._sets:
                each.scale(factor)

    def _adds_losses(self) -> bool:
        """Returns True if this rank adds its losses to the sum over all ranks. Ranks that split the
        logits of the same samples compute equal losses, so only the first of these ranks adds them.
        """
        return self._mesh.coordinates[self._mesh.logit_axis] == 0

    def _own_weight(self) -> float:
        """Returns what this rank adds to the weight of the batch's loss."""
        return self._loss.weight * self._adds_losses()

    def _own_loss(self, losses: Sequence[torch.Tensor]) -> float:
        """Returns what this rank adds to the sum of the loss over all ranks."""
        total = 0.0
        if self._adds_losses():
            total += sum(float(loss.detach()) for loss in losses)
        return total + sum(float(each.auxiliary_loss) for each in self._balanced)
