"""One thread that waits for sockets and clocks, and sleeps when there is nothing to do.

Everything that belongs to the thread is called by it alone, so nothing here needs a lock but the
queue through which other threads hand it work.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from unisono.errors import AbortedError

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

_log = logging.getLogger("unisono")

_FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
}
"""What a thread brings upon itself. Where it is blocked, the process ends without a word of
faulthandler's."""

Action = Callable[[], None]
Watched = socket.socket | int


class Alarm:
    """Something to be done later, unless it is cancelled."""

    def __init__(self, action: Action) -> None:
        self._action: Action | None = action

    def cancel(self) -> None:
        """It will not be done."""
        self._action = None

    def ring(self) -> None:
        """Does it, once."""
        action, self._action = self._action, None
        if action is not None:
            action()

    @property
    def cancelled(self) -> bool:
        """Whether there is nothing left to do."""
        return self._action is None


class Loop:
    """The thread, what it waits for, and what it will do."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, READ, self._drain)
        self._calls: deque[Action] = deque()
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._lock = threading.Lock()  # the descriptor to wake by is open, or nobody writes to it
        self._closed = False
        self._pid = os.getpid()

    # ---- from any thread

    def start(self, name: str) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, action: Action) -> None:
        """Has the thread do something soon. Raises `AbortedError` after `stop` and in a fork."""
        if os.getpid() != self._pid:  # where the lock may be held for ever
            raise AbortedError("the connections to other hosts belong to the parent process")
        with self._lock:
            if self._stopping:
                raise AbortedError("the connections to other hosts are closed")
            self._calls.append(action)
            os.eventfd_write(self._wake, 1)

    def run(self, action: Action, timeout_s: float) -> bool:
        """The same, and waits until it is done; returns whether it was, in time."""
        done = threading.Event()

        def act() -> None:
            try:
                action()
            finally:
                done.set()

        self.call(act)
        return done.wait(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Ends the thread and waits for that. What the thread watched is the caller's to close."""
        if self._thread is not None:
            with contextlib.suppress(AbortedError):
                self.call(self._end)
            self._thread.join(timeout_s)
        with self._lock:
            self._stopping = True
            if self._thread is None or not self._thread.is_alive():
                self._close()

    def abandon(self) -> None:
        """In a forked child: closes its copies of all descriptors. The parent's see nothing of it.

        Nothing may be taken out of the selector here: the child shares it with its parent.
        """
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._close()

    # ---- from the thread only

    def watch(self, what: Watched, events: int, action: Action) -> None:
        """Calls `action` whenever `what` is ready; replaces what was said about it before."""
        if what in self._selector.get_map():
            self._selector.modify(what, events, action)
        else:
            self._selector.register(what, events, action)

    def unwatch(self, what: Watched) -> None:
        """The end of `watch`, if it was watched. Before the descriptor is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(what)

    def later(self, delay_s: float, action: Action) -> Alarm:
        """Does something after a time."""
        alarm = Alarm(action)
        heapq.heappush(self._alarms, (time.monotonic() + delay_s, next(self._order), alarm))
        return alarm

    def _run(self) -> None:
        # Signals are for the main thread, which may be asleep in a call and must notice.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        while not self._stopping:
            for key, _ in self._selector.select(self._next_alarm_s()):
                # What an earlier one of these actions ended is not called any more.
                watched = self._selector.get_map().get(key.fd)
                if watched is key and not self._guarded(key.data):
                    self.unwatch(key.fd)  # or it would fail again at once, for ever
            while self._calls and not self._stopping:
                self._guarded(self._calls.popleft())
            while self._alarms and self._alarms[0][0] <= time.monotonic():
                self._guarded(heapq.heappop(self._alarms)[2].ring)

    def _next_alarm_s(self) -> float | None:
        while self._alarms and self._alarms[0][2].cancelled:
            heapq.heappop(self._alarms)
        return max(self._alarms[0][0] - time.monotonic(), 0) if self._alarms else None

    def _guarded(self, action: Action) -> bool:
        """A fault of ours in one action must not end the thread, on which all others depend."""
        try:
            action()
            return True
        except Exception:
            _log.exception("a connection between hosts met an error of unisono's own")
            return False

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _end(self) -> None:
        self._stopping = True

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._calls.clear()  # they hold on to groups
            self._alarms.clear()
            self._selector.close()
            os.close(self._wake)
