"""One thread that waits for sockets and clocks, and sleeps when there is nothing to do.

Everything that belongs to the thread is called by it alone. Other threads hand it work through a
queue, without a lock: a signal handler or the garbage collector may interrupt a thread between any
two steps, and hand over work of its own. It would wait for ever for a lock of the thread below it.
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
from typing import TYPE_CHECKING, TypeAlias

from unisono.errors import AbortedError

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

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
Watched: TypeAlias = "FileDescriptorLike"


class Timer:
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


class OneShotEvent:
    """Something that happens once; one thread waits for it.

    Unlike with `threading.Event`, who tells of it never waits for a thread that is interrupted in
    `wait`.
    """

    def __init__(self) -> None:
        self._untold = threading.Lock()
        self._untold.acquire()
        self.told = False
        """Whether it has happened."""

    def tell(self) -> None:
        """It has happened."""
        if not self.told:
            self.told = True
            self._untold.release()

    def wait(self, timeout_s: float) -> bool:
        """Waits for it; returns whether it has happened."""
        if not self.told:
            self._untold.acquire(timeout=timeout_s)
        return self.told


class Doorbell:
    """A descriptor to wake the thread by. It is open for as long as anybody holds the bell."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)

    def ring(self) -> None:
        """From any thread."""
        os.eventfd_write(self.fd, 1)

    def hush(self) -> None:
        """Makes it ready to be rung again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class EventLoop:
    """The thread, what it waits for, and what it will do."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        doorbell = Doorbell(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._doorbell: Doorbell | None = doorbell
        self._selector.register(doorbell.fd, READ, doorbell.hush)
        self._calls: deque[tuple[Action, OneShotEvent]] = (
            deque()
        )  # what is to be told when it is over
        self._alarms: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pid = os.getpid()

    # ---- from any thread

    def start(self, name: str) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, action: Action) -> None:
        """Has the thread do something soon. Raises `AbortedError` after its end and in a fork."""
        self._hand_over(action, OneShotEvent())

    def run(self, action: Action, timeout_s: float) -> None:
        """The same, and waits until it is done, or never will be. In the thread itself, where the
        garbage collector may call this, it does not wait."""
        over = OneShotEvent()
        self._hand_over(action, over)
        if not self._is_here():
            over.wait(timeout_s)

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end, if it was started, and not in the thread itself; returns
        whether it has. What it watched is the caller's to close."""
        if self._thread is None:
            self._close()
        elif not self._is_here():
            self._thread.join(timeout_s)
        return self._doorbell is None

    def abandon(self) -> None:
        """In a forked child: closes its copies of all descriptors. The parent's see nothing of it.

        Nothing may be taken out of the selector here: the child shares it with its parent.
        """
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._close()

    # ---- from the thread only

    def end(self) -> None:
        """Ends the thread: it does nothing more."""
        self._stopping = True

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

    def later(self, delay_s: float, action: Action) -> Timer:
        """Does something after a time."""
        alarm = Timer(action)
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
                    self.unwatch(key.fileobj)  # or it would fail again at once, for ever
            while self._calls and not self._stopping:
                self._do_call()
            while self._alarms and self._alarms[0][0] <= time.monotonic() and not self._stopping:
                self._guarded(heapq.heappop(self._alarms)[2].ring)
        self._close()

    def _do_call(self) -> None:
        action, over = self._calls.popleft()
        self._guarded(action)
        over.tell()

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

    def _is_here(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def _hand_over(self, action: Action, over: OneShotEvent) -> None:
        if os.getpid() != self._pid:
            raise AbortedError("the connections to other hosts belong to the parent process")
        doorbell = self._doorbell
        if self._stopping or doorbell is None:
            raise AbortedError("the connections to other hosts are closed")
        self._calls.append((action, over))
        doorbell.ring()
        if self._doorbell is None:  # the thread has ended meanwhile, perhaps without a look at this
            self._drop_calls()

    def _close(self) -> None:
        self._doorbell = None
        self._drop_calls()
        self._alarms.clear()
        self._selector.close()

    def _drop_calls(self) -> None:
        """They hold on to groups, and somebody may wait for them."""
        with contextlib.suppress(IndexError):
            while True:
                self._calls.popleft()[1].tell()
