"""The processes of one contestant, and the channels between the benchmark and the contestant's
ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from statistics import median

from unisono.bench.barrier import StartLine
from unisono.bench.cases import Case
from unisono.bench.cluster import Cluster
from unisono.bench.contestants import Contestant, plan_launch
from unisono.bench.rank_limit import reason_against
from unisono.bench.rank_messages import Message, RankConnection
from unisono.closing import Closing
from unisono.errors import UnisonoError
from unisono.temporary_folders import TemporaryFolder

_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 60.0
_QUIT_TIMEOUT_S = 5.0
_LOG_TAIL = 600


class ContestantError(UnisonoError):
    """A rank of a contestant did not start, did not answer in time, or ended."""


class CaseError(UnisonoError):
    """Every rank of a contestant refused one case. The ranks can run other cases."""


class ContestantRanks(Closing):
    """The ranks of one contestant, on this machine or on the hosts of a cluster. The ranks sleep
    between commands.

    Raises ContestantError if this machine cannot start so many ranks.
    """

    def __init__(
        self,
        contestant: Contestant,
        ranks: int,
        *,
        bind: bool = False,
        cluster: Cluster | None = None,
    ) -> None:
        if ranks < 1:
            raise ContestantError(f"expected 1 or more ranks, got {ranks}")
        if reason := reason_against(ranks):
            raise ContestantError(reason)
        self.contestant = contestant
        self.ranks = ranks
        self._bind_ranks = bind
        self._cluster = cluster
        self.late_s: tuple[float, ...] = ()
        """Seconds by which each rank started its last measurement later than the first rank. All
        ranks have the same clock, because they run on this machine."""
        self._scratch = TemporaryFolder("unisono-bench-")
        self._folder = self._scratch.path
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[RankConnection] = []

    @property
    def alive(self) -> bool:
        """True between `start` and `close`."""
        return bool(self._channels)

    def start(self) -> None:
        """Starts the ranks and waits until all of them have joined their group. Raises
        ContestantError."""
        StartLine.create(self._folder / "start_line", self.ranks)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._folder / "socket"))
            listener.listen(self.ranks)
            self._spawn()
            listener.settimeout(0.2)
            connections = self._accept(listener)
        ranked: dict[int, RankConnection] = {}
        for channel in connections:
            ranked[int(self._receive(channel, _START_TIMEOUT_S)["rank"])] = channel
        if sorted(ranked) != list(range(self.ranks)):
            raise ContestantError(
                f"expected ranks 0..{self.ranks - 1} to start, got {sorted(ranked)}"
            )
        self._channels = [ranked[rank] for rank in range(self.ranks)]

    def bind(self, case: Case) -> None:
        self._ask({"do": "bind", "case": case.to_dict()})

    def choose(self, algorithm: str) -> None:
        """Selects the algorithm for the current case. Raises CaseError if the library cannot do
        this; only Unisono's own communicator can."""
        self._ask({"do": "choose", "algorithm": algorithm})

    def verify(self) -> int:
        """Performs one call on known data. Returns the number of wrong elements on all ranks."""
        return sum(int(reply["wrong"]) for reply in self._ask({"do": "verify"}))

    def time_s(self, iterations: int) -> float:
        """Returns the seconds per call of the slowest rank, as the mean over `iterations`
        successive calls."""
        replies = self._ask({"do": "time", "iterations": iterations})
        began_s = [float(reply["began_s"]) for reply in replies]
        self.late_s = tuple(time_s - min(began_s) for time_s in began_s)
        return max(float(reply["elapsed_s"]) for reply in replies) / iterations

    def time_rewritten_s(self, iterations: int) -> float:
        """Returns the median seconds from the first rank's start of a call to the last rank's end.
        Before each call, every rank writes its input again, and waits for the others."""
        replies = self._ask({"do": "time rewritten", "iterations": iterations})
        by_call = zip(*(reply["times_s"] for reply in replies), strict=True)
        times_s = [
            float(max(end for _, end in call) - min(start for start, _ in call)) for call in by_call
        ]
        return median(times_s)

    def close(self) -> None:
        """Ends all processes of the contestant. Never raises."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send({"do": "quit"})
        deadline_s = time.monotonic() + (_QUIT_TIMEOUT_S if self._channels else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
            # The process leads a process group that includes its children, so they are killed too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for channel in self._channels:
            channel.close()
        self._processes, self._channels = [], []
        self._scratch.remove()

    def _spawn(self) -> None:
        if self._cluster is not None:
            self._cluster.lab.write_agent(self._folder / "agent")
        commands = plan_launch(
            self.contestant,
            ranks=self.ranks,
            folder=self._folder,
            bind=self._bind_ranks,
            cluster=self._cluster,
        )
        with (self._folder / "log").open("wb") as log:
            for command in commands:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._processes.append(process)

    def _accept(self, listener: socket.socket) -> list[RankConnection]:
        connections: list[RankConnection] = []
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while len(connections) < self.ranks:
            try:
                connections.append(RankConnection(listener.accept()[0]))
            except TimeoutError:
                self._raise_if_dead(timed_out=time.monotonic() > deadline_s)
        return connections

    def _raise_if_dead(self, *, timed_out: bool) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise ContestantError(f"a rank ended early: {self._log_tail()}")
        if timed_out:
            raise ContestantError(
                f"the ranks did not start within {_START_TIMEOUT_S:g} s: {self._log_tail()}"
            )

    def _ask(self, message: Message) -> list[Message]:
        try:
            for channel in self._channels:
                channel.send(message)
        except OSError as error:
            raise ContestantError(f"a rank ended: {self._log_tail()}") from error
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        replies = [
            self._receive(channel, max(0.1, deadline_s - time.monotonic()))
            for channel in self._channels
        ]
        errors = [str(reply["error"]) for reply in replies if "error" in reply]
        if len(errors) == self.ranks:
            raise CaseError(errors[0])
        if errors:
            raise ContestantError(f"some ranks failed: {errors[0]}")
        return replies

    def _receive(self, channel: RankConnection, timeout_s: float) -> Message:
        try:
            return channel.receive(timeout_s)
        except TimeoutError as error:
            raise ContestantError(f"a rank did not answer within {timeout_s:.0f} s") from error
        except EOFError as error:
            raise ContestantError(f"a rank ended: {self._log_tail()}") from error

    def _log_tail(self) -> str:
        text = (self._folder / "log").read_text(errors="replace").strip()
        return text[-_LOG_TAIL:] or "(it printed nothing)"
