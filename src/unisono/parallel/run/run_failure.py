"""The end of a run, after an error of a step that not all ranks have, and its causes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from torch import distributed as dist

from unisono.errors import (
    AbortedError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    UnisonoError,
)
from unisono.parallel.run.step.step_agreement import line_of
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Layout
from unisono.torch_backend import communicator_of


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, its cause, the cause of that error and so on, each once.

    An error that is raised again while an error that it caused is handled is its own cause.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


_WAIT_S = 1.0


def lost_rank_error(error: BaseException) -> PeerLostError | None:
    """Returns an error that names a lost rank by its number in torch's default group; None if
    `error` has another cause.

    An error of an axis's group has the rank's number in that group, and torch's pipelines wrap this
    error in their own error. The default group fails at its next use if it contains the lost rank.
    It still works if the rank only left the group of an axis.
    """
    found = next((each for each in with_causes(error) if isinstance(each, PeerLostError)), None)
    comm = None if found is None else communicator_of(dist.group.WORLD)
    with contextlib.suppress(UnisonoError, TimeoutError):
        try:
            if comm is not None:
                comm.barrier(async_op=True).wait(_WAIT_S)
        except PeerLostError as own:
            return own
    return found


_SPLIT = "mixed torch.Tensor and DTensor"  # in the message of torch's error
_CHANGED = "of RegisterPostBackwardFunction is a view"


def divided_use_error(error: BaseException, layout: Layout) -> ValueError | None:
    """Returns an error that names the cause, if a step has failed because `fully_shard` splits the
    parameters of a model that cannot be split, or because ranks exchanged different arrays. Returns
    None for other causes.
    """
    for found in with_causes(error):
        if (layout.zero >= 2 or layout.ep > 1) and _SPLIT in str(found):
            return ValueError(
                f"zero = {layout.zero} gathers the parameters of a module while its forward runs, "
                "but the model uses a parameter of a module that is not called at that time; call "
                "the module, or own the parameter in the module that uses it; zero = 1 works"
            )
        if _CHANGED in str(found):
            return ValueError(
                f"zero = {layout.zero} gathers the parameters of a module whose forward changes its"
                " input in place, which torch does not allow; change a copy (inplace=False, x = x +"
                " y instead of x += y); zero = 1 works"
            )
        if isinstance(found, MismatchError):
            if layout.zero >= 2 or layout.ep > 1:
                return ValueError(different_calls(layout))
            return ValueError(
                f"the ranks exchanged different activations in this step ({found}); pass the same "
                "whole batch on every rank, call the same modules on all ranks in the same order, "
                "and do not go on after an exception that only one rank caught"
            )
    return None


def different_calls(layout: Layout) -> str:
    """Returns the message for ranks that call different modules."""
    if layout.ep > 1:
        return (
            f"ep = {layout.ep} exchanges the tokens of experts between ranks, but in this step the "
            "ranks called different modules, or one of them left the step; call the layers of "
            "experts on all ranks, also without tokens for them; ep = 1 with zero = 1 works"
        )
    return (
        f"zero = {layout.zero} gathers the parameters of a module from all ranks of its group, but "
        "in this step the ranks called different modules, or in different orders, or one of them "
        "left the step with an error of its own; call the same modules on all ranks; zero = 1 works"
    )


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
