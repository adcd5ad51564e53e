"""Faults that one rank finds in a step, told to all ranks by the exchange of the loss.

A rank that raised at once would leave the others waiting in the collectives of the step. So a rank
notes its fault and goes on, and all ranks raise before the weights change.
"""

from __future__ import annotations

from collections.abc import Callable


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
