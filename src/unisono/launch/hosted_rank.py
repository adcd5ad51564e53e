"""A rank on an executor's worker: the worker starts the rank's process and returns its result."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait

from unisono import config
from unisono.bootstrap import dial_link, own_address, reserved_port, this_host
from unisono.errors import CommunicationError
from unisono.launch.pickling import pack
from unisono.launch.rank_results import GRACE_S, ended
from unisono.launch.worker_messages import Arrival, Assignment, version

_PROGRAM = "import sys; from unisono.launch.rank_process import main; main(int(sys.argv[1]))"


def host_rank(addresses: Sequence[tuple[str, int]], key: bytes, rank: int) -> None:
    """Starts the process of a rank, and sends its result to the program at `addresses`.

    Ends the process if the program closes the connection. Raises `RendezvousError` if the program
    cannot be reached.
    """
    program = dial_link(addresses, key, other_end="the program that called unisono.run")
    with program, reserved_port() as port, reserved_port() as torch_port:
        arrival = Arrival(
            rank=rank,
            version=version(),
            host=repr(this_host(config.settings().host_id)),
            address=own_address(program),
            ports=(port, torch_port),
        )
        with contextlib.suppress(EOFError, ConnectionError):  # the program has given up
            program.send(arrival)
            assignment = program.recv()
            with _process(assignment) as (process, pipe):
                if pipe in wait([program, pipe]):
                    program.send_bytes(_outcome(rank, process, pipe))


@contextlib.contextmanager
def _process(assignment: Assignment) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """Starts the process of a rank; ends it when the block ends."""
    ours, theirs = Pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=config.of_child(),
    )
    theirs.close()
    with ours:
        try:
            ours.send(assignment)
            yield process, ours
        finally:
            _end(process)


def _outcome(rank: int, process: subprocess.Popen[bytes], pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except (EOFError, ConnectionError):
        return pack((False, (_ended(rank, process), "")))


def _ended(rank: int, process: subprocess.Popen[bytes]) -> CommunicationError:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    return ended(rank, process.pid, process.returncode)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process if it still runs, first by SIGTERM, then by SIGKILL."""
    for seconds, stop in ((GRACE_S / 4, process.terminate), (GRACE_S, process.kill)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
        stop()
    process.wait()
