"""A checkpoint that a thread writes while the program goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path


class _Result:
    """The end of a save."""

    error: Exception | None = None
    is_told = False
    """The program knows the error."""


class PendingSave:
    """A checkpoint that is being written, which `ParallelRun.async_save` returns.

    An error is printed when it happens, since the program may end before its next call. The
    interpreter waits for the thread at its end.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        """Starts a thread that calls `write`, which writes the checkpoint `path`."""
        self.path = path
        """The folder of the checkpoint."""
        self.blocked_s = 0.0
        """Seconds for which `async_save` has blocked the program."""
        self._result = _Result()
        self._thread = threading.Thread(
            target=_run, args=(write, self._result, str(self)), name="unisono-checkpoint"
        )
        self._thread.start()

    def __str__(self) -> str:
        return f"the asynchronous save to {self.path}"

    def done(self) -> bool:
        """Returns True after the thread has written the checkpoint, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is complete on all ranks.

        Raises `RuntimeError` if it could not be written, on all ranks.
        """
        self._thread.join()
        if (error := self.failure()) is not None:
            self.tell()
            raise error from self._result.error

    def failure(self) -> RuntimeError | None:
        """Returns the error of a save that has failed."""
        error = self._result.error
        if error is None:
            return None
        found = RuntimeError(_text(str(self), error))
        found.__cause__ = error
        return found

    def untold_failure(self) -> RuntimeError | None:
        """Returns the error of a save that has failed, if the program does not know it."""
        return None if self._result.is_told else self.failure()

    def tell(self) -> None:
        """Notes that the program knows an error of this save."""
        self._result.is_told = True

    def join(self) -> None:
        """Waits for the end of the save, also if it fails."""
        self._thread.join()


def _run(write: Callable[[], None], result: _Result, who: str) -> None:
    try:
        write()
    except Exception as error:  # raised by `PendingSave.wait`, and by the next step or save
        result.error = error
        print(f"unisono: {_text(who, error)}", file=sys.stderr, flush=True)


def _text(who: str, error: Exception) -> str:
    return f"{who} failed: {type(error).__name__}: {' '.join(str(error).split())}"
