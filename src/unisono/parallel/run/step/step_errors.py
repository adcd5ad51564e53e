"""The errors of one rank in a step, which all ranks raise at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import distributed as dist
from torch import nn

from unisono.errors import UnisonoError
from unisono.parallel.divisible.interfaces import Exchanging
from unisono.parallel.run.run_end import with_causes
from unisono.planner import Layout


class StepFaults:
    """The first fault of this rank in the step under way."""

    def __init__(self) -> None:
        self.own: str | None = None
        """The message of this rank's fault; None without a fault."""

    def restart(self) -> None:
        """Begins a step."""
        self.own = None

    def note(self, message: str) -> None:
        """Notes a fault, unless this rank has one already."""
        self.own = self.own or message

    def check(self, action: Callable[[], None]) -> None:
        """Runs an action, and notes the `ValueError` that it raises."""
        try:
            action()
        except ValueError as error:
            self.note(str(error))

    def error(self) -> ValueError | None:
        """Returns the fault as an error, which the exchange of the loss tells all ranks."""
        return None if self.own is None else ValueError(self.own)


class StepFailure:
    """The first error of this rank in a step, which `StepAgreement` tells all ranks at its end.

    A rank that has failed takes part in the messages of the step until its end, without computing.
    So no other rank waits for it, and the ranks stay at the same step. This is not possible if the
    passes have collectives: then the ranks exchange errors before the passes, and a rank raises an
    error of its passes at once, which ends the run (`RunEnd`).
    """

    def __init__(self, layout: Layout, stages: Sequence[tuple[int, nn.Module]]) -> None:
        exchanges = any(isinstance(stage, Exchanging) for _, stage in stages)
        divides_samples = layout.dp * layout.pp == layout.devices
        self._is_shared = divides_samples and layout.ep == 1 and layout.zero < 2 and not exchanges
        self._has_passes = False
        self.error: Exception | None = None
        self.is_found = False
        """True if this rank or a rank before it in the pipeline has failed in this step."""

    def restart(self) -> None:
        """Begins a step. Until `begin_passes`, no other rank waits for this one."""
        self.error, self.is_found, self._has_passes = None, False, False

    def begin_passes(self) -> bool:
        """Returns True if a rank that has failed can take part in the step until its end."""
        self._has_passes = True
        return self._is_shared

    def note(self, error: Exception) -> None:
        """Keeps an error for the end of the step.

        Raises the error at once if the rank cannot take part in the step any more.
        """
        if self._has_passes and not self._is_shared:
            raise error
        self.keep(error)

    def keep(self, error: Exception) -> None:
        """Keeps an error for the end of the step, in any layout. Raises errors of communication."""
        if _is_from_communication(error):
            raise error
        if self.error is None and not self.is_found:
            self.error = error
        self.is_found = True

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keeps an error of the statements inside, whose collectives have ended."""
        try:
            yield
        except Exception as error:
            self.keep(error)

    def note_elsewhere(self) -> None:
        """Notes that another rank has failed."""
        self.is_found = True

    def take(self) -> Exception | None:
        """Returns the error of this rank, and forgets it: its traceback holds the step's memory."""
        error, self.error = self.error, None
        return error


def _is_from_communication(error: BaseException) -> bool:
    return any(isinstance(each, UnisonoError | dist.DistError) for each in with_causes(error))
