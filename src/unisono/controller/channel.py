"""The channel through which the ranks of a controller exchange messages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from unisono.communicator import Communicator, Work, fail_group, wait_for_message
from unisono.controller.messages import Message, decode, encode
from unisono.errors import CommunicationError

# Tags of the ranks' messages, and of the message that `wake` sends.
_MESSAGES, _WAKE = 1, 2
# The communicator practically never times out, because an idle controller waits without a limit.
_FOREVER_S = 1e9
_SILENCE_S = 1.0
_IDLE_S = 3600.0


class Channel:
    """Sends and receives messages on its own communicator, which `close` closes."""

    def __init__(self, comm: Communicator) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.closed = False
        self._comm = comm
        self._sent: deque[Work] = deque()
        self._lock = threading.Lock()
        self._woken = False
        self._nothing = np.zeros(1, np.uint8)
        comm.timeout_s = _FOREVER_S

    def send(self, dst: int, messages: Sequence[Message]) -> None:
        """Sends messages to another rank. Does not wait until that rank receives them."""
        text = np.frombuffer(encode(tuple(messages)), np.uint8)
        self._keep(self._comm.send(text, dst, _MESSAGES, async_op=True))

    def receive(self, is_idle: Callable[[], bool]) -> tuple[int, tuple[Message, ...]]:
        """Waits for messages. Returns the sender and its messages, or no messages if `wake` was
        called.

        If no message arrives for a second and `is_idle()` is true, the thread sleeps until a
        message arrives.
        """
        found = wait_for_message(self._comm, limit_s=_SILENCE_S, checks=True)
        while found is None:
            idle = is_idle()
            limit_s = _IDLE_S if idle else _SILENCE_S
            found = wait_for_message(self._comm, limit_s=limit_s, checks=not idle)
        text = np.empty(found.nbytes, np.uint8)
        self._comm.recv(text, found.source, found.tag)
        if found.tag == _WAKE:
            with self._lock:
                self._woken = False
            return found.source, ()
        return found.source, decode(text.tobytes())

    def wake(self) -> None:
        """Makes the current or the next `receive` of another thread return."""
        with self._lock:
            if self._woken or self.closed:
                return
            self._woken = True
        with suppress(CommunicationError):  # the receiving thread detects the failure
            self._keep(self._comm.send(self._nothing, self.rank, _WAKE, async_op=True))

    def stop(self) -> None:
        """Tells the receiving thread to end, then waits up to a second for messages that are still
        being sent. The thread of the loop calls this after its last message.
        """
        self.closed = True
        with suppress(CommunicationError):
            Work.wait_all(self._sent, timeout_s=1.0)

    def fail(self, error: Exception) -> None:
        """Fails the channel on all ranks because of an error."""
        with suppress(CommunicationError):
            fail_group(self._comm, error)

    def close(self) -> None:
        """Closes the communicator."""
        self._comm.close()

    def _keep(self, work: Work) -> None:
        with self._lock:
            while self._sent and self._sent[0].is_completed():
                self._sent.popleft()
            if not work.is_completed():
                self._sent.append(work)
