"""Messages between all ranks, which are in different phases when a fault interrupts them.

Small and large unmatched messages are sent but not received. Posted receives, from one rank and
from any rank, have no matching send. In every step, small and large messages run during
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from unisono import Communicator
from unisono.communicator import Work

SMALL, LARGE = 1, 131_072
"""Elements of 8 bytes."""
_STEP, _ANY, _UNMATCHED, _POSTED, _POSTED_ANY, _BLOCKING = range(1, 7)
_END_S = 1.0
"""Time within which a message fails after its group."""


class Pending(NamedTuple):
    """A message that has begun and not ended."""

    sends: bool
    work: Work


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a message that was pending."""

    sends: bool
    error: str | None
    text: str


class Traffic:
    """The messages of one rank; every rank has such an object."""

    def __init__(self, comm: Communicator, *, blocking: bool = True) -> None:
        """Begins the messages that stay pending. If `blocking` is true, each step also makes a
        blocking call, which waits only for neighbours. After a timeout, such a call names the
        neighbour, and not the rank that causes the delay.
        """
        self._comm = comm
        self._blocking = blocking
        self._steps = 0
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._right, self._left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        self._posted = {
            (source, count): np.zeros(count)
            for source in (*self._others, None)
            for count in ((SMALL, LARGE) if source is not None else (SMALL,))
        }
        self._pending: list[Pending] = []
        for (source, count), buffer in self._posted.items():
            tag = _POSTED if source is not None else _POSTED_ANY
            self._begin(False, comm.recv(buffer, source, tag * 2 + (count == LARGE), async_op=True))
        for other in self._others:
            for count in (SMALL, LARGE):
                tag, x = _UNMATCHED * 2 + (count == LARGE), self._data(comm.rank, count, 0)
                self._begin(True, comm.send(x, other, tag, async_op=True))

    def step(self, meanwhile: Callable[[], None]) -> None:
        """Exchanges small and large messages with both neighbours. While these messages are
        pending, calls `meanwhile`, which performs collectives of all ranks.
        """
        comm, self._steps = self._comm, self._steps + 1
        buffers, works = [], []
        for count, source, tag in (
            (SMALL, self._left, _STEP), (LARGE, self._left, _STEP), (SMALL, None, _ANY),
        ):  # fmt: skip
            buffer, own_tag = np.zeros(count), tag * 2 + (count == LARGE)
            works.append(comm.recv(buffer, source, own_tag, async_op=True))
            x = self._data(comm.rank, count, self._steps)
            works.append(comm.send(x, self._right, own_tag, async_op=True))
            buffers.append(buffer)
        meanwhile()
        for work in works:
            work.wait()
        for buffer in buffers:
            self._check(buffer, self._left)
        if self._blocking:
            out = np.zeros(SMALL)
            x = self._data(comm.rank, SMALL, self._steps)
            comm.sendrecv(x, self._right, out, self._left, _BLOCKING * 2)
            self._check(out, self._left)

    def complete(self) -> None:
        """Completes all messages that `__init__` has left pending, and checks all data."""
        comm, works = self._comm, list[Work]()
        for other in self._others:
            for count in (SMALL, LARGE):
                x, tag = self._data(comm.rank, count, self._steps), _POSTED * 2 + (count == LARGE)
                works.append(comm.send(x, other, tag, async_op=True))
        x = self._data(comm.rank, SMALL, self._steps)
        works.append(comm.send(x, self._right, _POSTED_ANY * 2, async_op=True))
        for other in self._others:
            for count in (SMALL, LARGE):
                buffer, tag = np.zeros(count), _UNMATCHED * 2 + (count == LARGE)
                comm.recv(buffer, other, tag)
                assert (buffer == self._data(other, count, 0)).all()
        for work in (*works, *(pending.work for pending in self._pending)):
            work.wait()
        for (source, _), buffer in self._posted.items():
            self._check(buffer, self._left if source is None else source)

    def outcomes(self) -> list[Outcome]:
        """Returns the results of all messages that `__init__` has left pending, after the group's
        failure.
        """
        found = []
        for sends, work in self._pending:
            error, text = None, ""
            try:
                work.wait(_END_S)
            except Exception as raised:
                error, text = type(raised).__name__, str(raised)
            found.append(Outcome(sends=sends, error=error, text=text))
        return found

    def _begin(self, sends: bool, work: Work) -> None:
        self._pending.append(Pending(sends, work))

    def _data(self, source: int, count: int, step: int) -> Any:
        return np.arange(count, dtype=np.float64) + source * 1000 + step

    def _check(self, buffer: Any, source: int) -> None:
        assert (buffer == self._data(source, buffer.size, self._steps)).all()
