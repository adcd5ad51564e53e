"""The errors of one rank in a step, which all ranks raise at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import distributed as dist

from unisono.errors import UnisonoError
from unisono.parallel.divisible.interfaces import Exchanging
from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.run_failure import with_causes


class StepErrors:
    """The first fault and the first failure of this rank in a step.

    A rank that raised at once would leave the others waiting, so `StepAgreement` tells its error to
    all ranks before the weights change. With a fault, the rank computes on. A rank that has failed
    takes part in the messages of the step until its end, without computing. This is not possible if
    the passes have collectives: then the ranks exchange errors before the passes, and a rank raises
    an error of its passes at once, which ends the run (`RunEnd`).
    """

    def __init__(self, model: DividedModel) -> None:
        layout = model.mesh.layout
        exchanges = any(isinstance(stage, Exchanging) for stage in model.modules)
        divides_samples = layout.dp * layout.pp == layout.devices
        self._is_shared = divides_samples and layout.ep == 1 and layout.zero < 2 and not exchanges
        self.restart()

    def restart(self) -> None:
        """Begins a step. Until `begin_passes`, no other rank waits for this one."""
        self._has_passes = False
        self.fault: str | None = None
        self._failure: Exception | None = None
        self.is_failed = False
        """True if this rank or a rank before it in the pipeline has failed in this step."""

    @property
    def first(self) -> Exception | None:
        """The error of this rank."""
        return self._failure if self.fault is None else ValueError(self.fault)

    def note_fault(self, message: str) -> None:
        """Notes a fault, unless this rank has one already."""
        self.fault = self.fault or message

    def check(self, action: Callable[[], None]) -> None:
        """Runs an action, and notes the `ValueError` that it raises as a fault."""
        try:
            action()
        except ValueError as error:
            self.note_fault(str(error))

    def begin_passes(self) -> bool:
        """Returns True if a rank that has failed can take part in the step until its end."""
        self._has_passes = True
        return self._is_shared

    def fail(self, error: Exception) -> None:
        """Keeps an error for the end of the step.

        Raises the error at once if the rank cannot take part in the step any more.
        """
        if self._has_passes and not self._is_shared:
            raise error
        self._keep(error)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keeps an error of the statements inside, whose collectives have ended."""
        try:
            yield
        except Exception as error:
            self._keep(error)

    def _keep(self, error: Exception) -> None:
        if any(isinstance(each, UnisonoError | dist.DistError) for each in with_causes(error)):
            raise error  # of communication
        if self._failure is None and not self.is_failed:
            self._failure = error
        self.is_failed = True

    def take(self) -> Exception | None:
        """Returns the failure, and forgets it: its traceback holds the memory of the step."""
        error, self._failure = self._failure, None
        return error
