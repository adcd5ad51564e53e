"""The asynchronous saves of a run: one at a time, with process groups and errors of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import distributed as dist

from unisono.parallel.checkpoint import PendingSave
from unisono.parallel.training_mesh import TrainingMesh


class AsyncSaves:
    """The save of a run that a thread writes, and its error until the program knows it.

    The threads of the ranks communicate in a group of their own, so they do not disturb the calls
    of steps. An error of one rank ends the saves of all ranks.
    """

    def __init__(self, mesh: TrainingMesh) -> None:
        self._mesh = mesh
        self._group: dist.ProcessGroup | None = None
        self._pending: PendingSave | None = None

    def group(self) -> dist.ProcessGroup:
        """Returns the group of the threads. Collective."""
        if self._group is None:
            self._group = self._mesh.make_all_ranks()
            self._mesh.closing.append(self._close)
        return self._group

    def begin(self, path: Path, write: Callable[[], None]) -> PendingSave:
        """Starts a thread that writes the checkpoint `path`."""
        self._pending = PendingSave(path, write)
        return self._pending

    def finish(self) -> None:
        """Waits for the save. Collective.

        Raises `RuntimeError` on all ranks if it has failed and a rank does not know this yet.
        """
        if self._group is None:  # on all ranks
            return
        error = None
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.join()
            error = pending.untold_failure()
            pending.tell()
        problems = self._mesh.of_all_ranks("" if error is None else str(error))
        if error is not None:
            raise error
        if any(problems):
            raise RuntimeError(next(filter(None, problems)))

    def require_good(self) -> None:
        """Raises the error of a save that has failed, once. Other ranks may not know it yet."""
        pending = self._pending
        if pending is not None and pending.done():
            self._pending = None
            if (error := pending.untold_failure()) is not None:
                pending.tell()
                raise error

    def note(self, error: BaseException) -> None:
        """Notes an error of a step on all ranks. If it is that of the save, which another rank has
        found, this rank does not raise it again."""
        pending = self._pending
        if pending is not None and str(pending) in str(error):
            self._pending = None
            pending.tell()

    def _close(self) -> None:
        """Waits for the save, and destroys the group."""
        if self._pending is not None:
            self._pending.join()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
