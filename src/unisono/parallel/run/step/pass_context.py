"""The context of each pass of a microbatch: dropout masks, buffers, balance losses, autocast."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from unisono.errors import UnisonoError
from unisono.parallel.divisible.interfaces import Balanced, attached
from unisono.parallel.expert_stacks import DividedExperts
from unisono.parallel.layers import BatchPlace, LayoutDropout
from unisono.parallel.precision import Precision
from unisono.parallel.run.batch.batch_parts import BatchPart, Microbatch
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.loss.batch_loss import BatchLoss
from unisono.parallel.run.step.written_buffers import WrittenBuffers

_DEVICE = "cpu"
_OF_TYPES = re.compile(r"dtype|scalar type|not implemented for '(Half|BFloat16)'")


class StepAutocast:
    """The autocast of each forward pass of a step.

    It is that which the caller of the step has entered. A precision of 16 bits enters it, too: it
    converts what meets the copies of weights in another type, and computes losses in float32.

    One autocast around all passes would keep the converted weights of the first microbatch for the
    others: their gradients would be lost, or come from weights that ZeRO has freed. So forward
    passes convert weights anew, and backward passes run without autocast, as torch recommends.
    """

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._given: torch.dtype | None = None
        self.dtype: torch.dtype | None = None
        """The type to which autocast converts; None without autocast."""

    def enter_step(self) -> AbstractContextManager[None]:
        """Notes the caller's autocast; returns a context of the step, without autocast."""
        is_enabled = torch.is_autocast_enabled(_DEVICE)
        self._given = torch.get_autocast_dtype(_DEVICE) if is_enabled else None
        own = self._precision.computation_type if self._precision.is_narrow else None
        self.dtype = own or self._given
        return torch.autocast(_DEVICE, enabled=False) if is_enabled else nullcontext()

    def require_one(self) -> None:
        """Raises `ValueError` if the caller's autocast and the precision of the run differ."""
        computation = self._precision.computation_type
        if self._given is not None and computation not in (None, self._given):
            raise ValueError(
                f"torch.autocast converts to {self._given}, but the precision of this run computes "
                f"in {computation}; expected one of them: call step without autocast"
            )

    def forward(self) -> AbstractContextManager[None]:
        """Returns a context for a forward pass and its loss."""
        own = self._precision.computation_type
        if self.dtype is None:
            return nullcontext() if own is None else _explaining(own)
        autocast = torch.autocast(_DEVICE, dtype=self.dtype, cache_enabled=False)
        return autocast if own is None else _explaining(own, autocast)

    def leave_step(self) -> None:
        """Forgets converted weights that the caller's own passes have kept: they are outdated."""
        if self._given is not None:
            torch.clear_autocast_cache()


@contextmanager
def _explaining(
    dtype: torch.dtype, inner: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Raises `ValueError` in one line if a model cannot compute in a type."""
    try:
        with inner or nullcontext():
            yield
    except RuntimeError as error:
        if isinstance(error, UnisonoError | dist.DistError) or not _OF_TYPES.search(str(error)):
            raise
        raise ValueError(
            f"precision: the model cannot compute in {dtype}: {' '.join(str(error).split())}; "
            "expected functions that torch has for this type, and tensors of the type of the "
            "weights, such as x.to(self.weight.dtype)"
        ) from error


class PassContext:
    """The state that makes the passes of a microbatch equal those of one process."""

    def __init__(
        self,
        model: DividedModel,
        call: ModelCall,
        loss: BatchLoss,
        loss_modules: Sequence[tuple[str, nn.Module]],
    ) -> None:
        """`loss_modules`: the modules of the loss, with names."""
        self._call, self._loss = call, loss
        modules = [each for stage in model.modules for each in stage.modules()]
        self.balanced = [each for each in modules if isinstance(each, Balanced)]
        """The modules with a balance loss."""
        self._experts = [
            each for stage in model.modules for each in attached(stage, DividedExperts)
        ]
        roots = [("", stage) for stage in model.modules]
        roots += [(f"loss.{name}" if name else "loss", module) for name, module in loss_modules]
        self.written = WrittenBuffers(roots, is_pipeline=model.mesh.layout.pp > 1)
        self.autocast = StepAutocast(model.precision)
        self._place = BatchPlace()
        self._microbatches: Sequence[Microbatch] = ()
        self._balance_scales: Sequence[float] = ()
        for module in modules:
            if isinstance(module, LayoutDropout):
                module.place = self._place

    def begin(self, step: int, part: BatchPart, scale: float) -> None:
        """Begins a step with this rank's part of a batch. `scale`: factor of all losses."""
        self._place.step, self._microbatches = step, part.microbatches
        self.written.begin()
        for module in self.balanced:
            module.reset_auxiliary()
        for experts in self._experts:
            experts.restart()
        one = scale / part.samples
        self._balance_scales = [one if each.own else 0.0 for each in part.microbatches]

    def forward(self, number: int) -> AbstractContextManager[None]:
        """Prepares the forward pass of a microbatch, and returns its context."""
        self._enter(number)
        self.written.begin_pass()
        watching = self._loss.watching()
        return self.autocast.forward() if watching is None else self._watched(watching)

    @contextmanager
    def _watched(self, watching: AbstractContextManager[None]) -> Iterator[None]:
        with self.autocast.forward(), watching:
            yield

    def backward(self, number: int) -> AbstractContextManager[None]:
        """Prepares the backward pass of a microbatch; in the context that it returns, a forward
        pass that runs again equals the first one."""
        self._enter(number)
        watching = self._call.again() or nullcontext()
        again = self.balanced or self.written.has_norms
        return self._again(watching) if again else watching

    @contextmanager
    def _again(self, watching: AbstractContextManager[None]) -> Iterator[None]:
        # a forward pass that runs again would add its balance loss a second time
        before = [each.auxiliary_loss for each in self.balanced]
        try:
            with self.written.passing_again(), watching:
                yield
        finally:
            for module, loss in zip(self.balanced, before, strict=True):
                module.auxiliary_loss = loss

    def _enter(self, number: int) -> None:
        """Sets the number of a pass's first sample, which determines dropout masks, and the factor
        of balance losses, which is 0 for a sample that does not count."""
        part = self._microbatches[number]
        self._place.first_sample, self._place.samples = part.first_sample, part.passed
        for module in self.balanced:
            module.auxiliary_scale = self._balance_scales[number]
