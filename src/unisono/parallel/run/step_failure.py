"""An error of one rank in a step, which all ranks raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist

from unisono.errors import UnisonoError
from unisono.planner import Layout


class StepFailure:
    """The first error of this rank in a step, and the errors of all ranks at its end.

    A rank that has failed takes part in the messages of the step until its end, without computing.
    So no other rank waits for it, and the ranks stay at the same step. This is not possible if the
    passes have collectives, without a pipeline: then the rank raises its error at once.
    """

    def __init__(self, layout: Layout) -> None:
        has_collectives = max(layout.tp, layout.cp, layout.ep) > 1 or layout.zero >= 2
        self._is_shared = layout.pp > 1 or not has_collectives
        self._error: Exception | None = None
        self.is_found = False
        """True if this rank or a rank before it in the pipeline has failed in this step."""

    def restart(self) -> None:
        """Begins a step."""
        self._error, self.is_found = None, False

    def note(self, error: Exception) -> None:
        """Keeps an error for the end of the step.

        Raises the error at once if the rank cannot take part in the step any more.
        """
        if not self._is_shared or _is_from_communication(error):
            raise error
        if self._error is None and not self.is_found:
            self._error = error
        self.is_found = True

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes an error of the statements inside, instead of raising it."""
        try:
            yield
        except Exception as error:
            self.note(error)

    def note_elsewhere(self) -> None:
        """Notes that another rank has failed."""
        self.is_found = True

    def take(self) -> Exception | None:
        """Returns the error of this rank, and forgets it: its traceback holds the step's memory."""
        error, self._error = self._error, None
        return error

    @property
    def count(self) -> float:
        """1.0 if this rank has an error, else 0.0; for a sum over all ranks."""
        return float(self._error is not None)

    def raise_everywhere(self, step: int) -> None:
        """Raises the error on this rank, or an error that names the rank that has it. Collective.

        Call if the sum of `count` over all ranks is not 0.
        """
        own = self._error
        text = None if own is None else f"{type(own).__name__}: {' '.join(str(own).split())}"
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, text)
        if own is not None:
            raise own
        rank, text = next((rank, each) for rank, each in enumerate(found) if each is not None)
        raise RuntimeError(
            f"step {step} has failed on rank {rank}, so no rank has changed its weights; call step "
            f"with another batch, or correct the cause: {text}"
        )


def _is_from_communication(error: BaseException) -> bool:
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, UnisonoError | dist.DistError):
            return True
        found = found.__cause__ or found.__context__
    return False
