"""An event loop: one thread that waits for sockets and timers.

Only this thread uses the descriptors, the timers and the actions of the loop. Other threads pass
actions through a queue without a lock. A signal handler or the garbage collector may interrupt a
thread between any two steps, and then pass an action itself. With a lock, it would wait forever for
the interrupted thread.
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
"""Signals that a thread causes itself. If one is blocked, the process ends without a report by
faulthandler."""

Action = Callable[[], None]
Watched: TypeAlias = "FileDescriptorLike"


class Timer:
    """An action that runs later, unless it is cancelled."""

    def __init__(self, action: Action) -> None:
        self._action: Action | None = action

    def cancel(self) -> None:
        """Cancels the action."""
        self._action = None

    def run(self) -> None:
        """Runs the action, once."""
        action, self._action = self._action, None
        if action is not None:
            action()

    @property
    def cancelled(self) -> bool:
        """True if the action has run or was cancelled."""
        return self._action is None


class OneShotEvent:
    """An event that happens once; one thread waits for it.

    Unlike `threading.Event`, setting it never waits for a thread that was interrupted in `wait`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.happened = False
        """True if the event has happened."""

    def set(self) -> None:
        """Sets the event."""
        if not self.happened:
            self.happened = True
            self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the event. Returns True if the event has happened."""
        if not self.happened:
            self._lock.acquire(timeout=timeout_s)
        return self.happened


class Doorbell:
    """A descriptor that wakes the loop's thread. It stays open as long as an object refers to the
    doorbell."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)

    def ring(self) -> None:
        """Wakes the thread. Any thread may call this."""
        os.eventfd_write(self.fd, 1)

    def reset(self) -> None:
        """Resets the doorbell, so that it can be rung again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class EventLoop:
    """The thread, its watched descriptors, timers and queued actions."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        doorbell = Doorbell(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._doorbell: Doorbell | None = doorbell
        self._selector.register(doorbell.fd, READ, doorbell.reset)
        self._calls: deque[tuple[Action, OneShotEvent]] = (
            deque()
        )  # actions, each with an event to set when it is done
        self._timers: list[tuple[float, int, Timer]] = []
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
        """Queues an action for the thread. Raises `AbortedError` after the thread's end and in a
        forked child.
        """
        self._hand_over(action, OneShotEvent())

    def run(self, action: Action, timeout_s: float) -> None:
        """Queues an action and waits until it is done or dropped. Does not wait in the thread
        itself, where the garbage collector may call this."""
        done = OneShotEvent()
        self._hand_over(action, done)
        if not self._is_here():
            done.wait(timeout_s)

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end, except in the thread itself. Returns True if the thread has
        ended. The caller closes the watched descriptors."""
        if self._thread is None:
            self._close()
        elif not self._is_here():
            self._thread.join(timeout_s)
        return self._doorbell is None

    def abandon(self) -> None:
        """Closes a forked child's copies of all descriptors; the parent's are not affected.

        This must not unregister descriptors from the selector, which the child shares with its
        parent.
        """
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._close()

    # ---- from the thread only

    def end(self) -> None:
        """Ends the thread. It does not run further actions."""
        self._stopping = True

    def watch(self, what: Watched, events: int, action: Action) -> None:
        """Calls `action` whenever `what` is ready; replaces an earlier `watch` of `what`."""
        if what in self._selector.get_map():
            self._selector.modify(what, events, action)
        else:
            self._selector.register(what, events, action)

    def unwatch(self, what: Watched) -> None:
        """Ends a `watch`, if there is one. Call this before the descriptor is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(what)

    def later(self, delay_s: float, action: Action) -> Timer:
        """Runs an action after a delay."""
        timer = Timer(action)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), timer))
        return timer

    def _run(self) -> None:
        # Block signals here, so that they wake the main thread, which handles them and may sleep in
        # a call.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        while not self._stopping:
            for key, _ in self._selector.select(self._next_timer_s()):
                # Skip a descriptor that an earlier action of this iteration has unwatched.
                watched = self._selector.get_map().get(key.fd)
                if watched is key and not self._guarded(key.data):
                    self.unwatch(key.fileobj)  # else the action would fail again at once, forever
            while self._calls and not self._stopping:
                self._do_call()
            while self._timers and self._timers[0][0] <= time.monotonic() and not self._stopping:
                self._guarded(heapq.heappop(self._timers)[2].run)
        self._close()

    def _do_call(self) -> None:
        action, done = self._calls.popleft()
        self._guarded(action)
        done.set()

    def _next_timer_s(self) -> float | None:
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        return max(self._timers[0][0] - time.monotonic(), 0) if self._timers else None

    def _guarded(self, action: Action) -> bool:
        """Runs an action. A bug of unisono in one action must not end the thread, on which all
        other actions depend."""
        try:
            action()
            return True
        except Exception:
            _log.exception("unisono failed to handle an event of a connection between hosts")
            return False

    def _is_here(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def _hand_over(self, action: Action, done: OneShotEvent) -> None:
        if os.getpid() != self._pid:
            raise AbortedError("the connections to other hosts belong to the parent process")
        doorbell = self._doorbell
        if self._stopping or doorbell is None:
            raise AbortedError("the connections to other hosts are closed")
        self._calls.append((action, done))
        doorbell.ring()
        if (
            self._doorbell is None
        ):  # the thread has ended meanwhile, perhaps before it saw this action
            self._drop_calls()

    def _close(self) -> None:
        self._doorbell = None
        self._drop_calls()
        self._timers.clear()
        self._selector.close()

    def _drop_calls(self) -> None:
        """Drops queued actions, which would keep groups alive, and wakes threads that wait for the
        actions.
        """
        with contextlib.suppress(IndexError):
            while True:
                self._calls.popleft()[1].set()
