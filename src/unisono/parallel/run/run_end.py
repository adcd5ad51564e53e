"""The end of a run, after an error of a step that not all ranks have."""

from __future__ import annotations

import re

from unisono.errors import AbortedError, CollectiveTimeoutError, PeerLostError
from unisono.parallel.run.divided_use import divided_use_error
from unisono.parallel.run.error_causes import with_causes
from unisono.parallel.run.lost_rank import lost_rank_error
from unisono.parallel.run.step_agreement import line_of
from unisono.parallel.training_mesh import TrainingMesh

_CURE = (
    "this run has ended: on all ranks, call its mesh.close(), build the model again, call "
    "parallelize, and load a checkpoint"
)
_TOLD = re.compile(r"rank \d+ (refused|failed in) step \d+: .*" + re.escape(_CURE), re.DOTALL)


class RunEnd:
    """The error that has ended a run.

    A rank whose step ends in an error of its own leaves collectives that other ranks wait in. So
    the rank ends the groups of the mesh, with the cause. The groups belong to the run; torch's
    default group still works. The ranks may have different weights then, so the run takes no
    further step. With one rank, a run never ends.
    """

    def __init__(self, mesh: TrainingMesh) -> None:
        self._mesh = mesh
        self._cause: Exception | None = None

    def require_usable(self) -> None:
        """Raises an error if the run has ended."""
        if self._cause is None:
            return
        text = str(self._cause)
        raise type(self._cause)(text if _CURE in text else f"{text}; {_CURE}")

    def end(self, error: BaseException, *, step: int) -> BaseException:
        """Ends the run on all ranks, unless another rank has; returns the error to raise here.

        `error`: that of this rank, or of a communicator that another rank has ended.
        """
        layout, told = self._mesh.layout, _told(error)
        found: BaseException = error
        if told is not None:
            cause: Exception = AbortedError(told[0])
            found = ValueError(told[0]) if told[1] else cause
        else:
            found = lost_rank_error(error) or divided_use_error(error, layout) or error
            cause = self._cause_of(found, step)
        if layout.devices > 1 and self._cause is None:
            self._cause = cause
            self._mesh.fail(cause)
        return found

    def _cause_of(self, error: BaseException, step: int) -> Exception:
        """Returns the error that ends the groups."""
        if isinstance(error, PeerLostError | CollectiveTimeoutError):
            return type(error)(" ".join(str(error).split()))
        verb = "refused" if type(error) is ValueError else "failed in"
        rank = self._mesh.rank
        return AbortedError(f"rank {rank} {verb} step {step}: {line_of(error)}; {_CURE}")


def _told(error: BaseException) -> tuple[str, bool] | None:
    """Returns what the rank that ended the run says, and whether it refuses the step; None if no
    rank has ended the run."""
    for found in with_causes(error):
        said = _TOLD.search(str(found)) if isinstance(found, AbortedError) else None
        if said is not None:
            return said[0], said[1] == "refused"
    return None
