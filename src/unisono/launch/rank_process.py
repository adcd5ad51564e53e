"""The process of a rank: calls the function and reports the result or the failure."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import signal
import traceback
from multiprocessing.connection import Connection

from unisono.errors import UnisonoError
from unisono.launch.pickling import pack

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Makes the kernel end this process when its parent process ends, even by a signal."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def report(packed: bytes, rank: int, pipe: Connection) -> None:
    """Calls a pickled function with its arguments, and sends the result or failure through `pipe`.

    Closes the pipe. Raises errors that are no `Exception`, such as `KeyboardInterrupt`, again.
    """
    try:
        fn, args = pickle.loads(packed)
        pipe.send_bytes(pack((True, fn(*args))))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            pipe.send_bytes(pack((False, (_picklable(error), f"rank {rank}:\n{trace}"))))
        if not isinstance(error, Exception):
            raise
    finally:
        pipe.close()


def _picklable(error: BaseException) -> BaseException:
    """Returns the error if it can be pickled and is not SystemExit, else an error with its text."""
    if isinstance(error, SystemExit):
        return UnisonoError(f"the rank called sys.exit({error.code!r})")
    try:
        clone = pickle.loads(pack(error))
    except Exception:
        return UnisonoError(f"{type(error).__name__}: {error}")
    return error if type(clone) is type(error) else UnisonoError(str(error))


def main(descriptor: int) -> None:
    """Runs a rank on an executor's worker, with the connection of this file descriptor to it."""
    end_with_parent()
    with Connection(descriptor) as pipe:
        assignment = pipe.recv()
        assignment.export()
        report(assignment.call, assignment.world.rank, pipe)
