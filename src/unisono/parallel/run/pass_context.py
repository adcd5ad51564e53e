"""The context of each pass of a microbatch: dropout masks, buffers, balance losses, autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from unisono.parallel.divisible.interfaces import Balanced, attached
from unisono.parallel.expert_stacks import DividedExperts
from unisono.parallel.layers import BatchPlace, LayoutDropout
from unisono.parallel.precision import Precision
from unisono.parallel.run.batch_parts import BatchPart, Microbatch
from unisono.parallel.run.recomputation import without_second_count
from unisono.parallel.run.step_autocast import StepAutocast
from unisono.parallel.run.written_buffers import WrittenBuffers


class PassContext:
    """The state that makes the passes of a microbatch equal those of one process."""

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        loss: Sequence[tuple[str, nn.Module]],
        *,
        watching: Callable[[], AbstractContextManager[None] | None],
        again: Callable[[], AbstractContextManager[None] | None],
        is_pipeline: bool,
        precision: Precision,
    ) -> None:
        """`loss`: the modules of the loss, with names. `watching`: makes a context of each forward
        pass, if it needs one; `again`: of each backward pass. `is_pipeline`: the passes of several
        microbatches overlap."""
        modules = [each for _, stage in stages for each in stage.modules()]
        self.balanced = [each for each in modules if isinstance(each, Balanced)]
        """The modules with a balance loss."""
        self._experts = [each for _, stage in stages for each in attached(stage, DividedExperts)]
        roots = [("", stage) for _, stage in stages]
        roots += [(f"loss.{name}" if name else "loss", module) for name, module in loss]
        self.written = WrittenBuffers(roots, is_pipeline=is_pipeline)
        self.autocast = StepAutocast(precision)
        self._watching, self._watching_again = watching, again
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
        watching = self._watching()
        return self.autocast.forward() if watching is None else self._watched(watching)

    @contextmanager
    def _watched(self, watching: AbstractContextManager[None]) -> Iterator[None]:
        with self.autocast.forward(), watching:
            yield

    def backward(self, number: int) -> AbstractContextManager[None]:
        """Prepares the backward pass of a microbatch; in the context that it returns, a forward
        pass that runs again equals the first one."""
        self._enter(number)
        watching = self._watching_again()
        if self.balanced or self.written.has_norms:
            return self._again(watching or nullcontext())
        return watching or nullcontext()

    @contextmanager
    def _again(self, watching: AbstractContextManager[None]) -> Iterator[None]:
        with without_second_count(self.balanced), self.written.passing_again(), watching:
            yield

    def _enter(self, number: int) -> None:
        """Sets the number of a pass's first sample, which determines dropout masks, and the factor
        of balance losses, which is 0 for a sample that does not count."""
        part = self._microbatches[number]
        self._place.first_sample, self._place.samples = part.first_sample, part.passed
        for module in self.balanced:
            module.auxiliary_scale = self._balance_scales[number]
