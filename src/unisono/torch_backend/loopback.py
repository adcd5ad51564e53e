"""Messages of a rank to itself."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import CollectiveTimeoutError, MismatchError
from unisono.torch_backend.private import hide_from_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable


class Loopback:
    """Matches a rank's sends to itself with its receives from itself: by tag, in order.

    A send keeps a copy and is done at once, so a rank need not receive before it sends.
    `timeout_s` tells how long a receive waits.
    """

    def __init__(self, timeout_s: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._messages: defaultdict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._receives: defaultdict[int, deque[SelfReceive]] = defaultdict(deque)

    def send(self, x: torch.Tensor, tag: int) -> SelfSend:
        """Hand a copy of `x` to the oldest receive of this tag, or keep it for the next one."""
        message = x.detach().clone()
        with self._lock:
            if not self._receives[tag]:
                self._messages[tag].append(message)
                return SelfSend()
            receive = self._receives[tag].popleft()
        receive.deliver(message)
        return SelfSend()

    def receive(self, x: torch.Tensor, tag: int, rank: int) -> SelfReceive:
        """Take the oldest message of this tag into `x`, now or when it is sent."""
        receive = SelfReceive(x, rank, self._timeout_s())
        with self._lock:
            if not self._messages[tag]:
                self._receives[tag].append(receive)
                return receive
            message = self._messages[tag].popleft()
        receive.deliver(message)
        return receive

    def has(self, tag: int) -> bool:
        """Whether a message of this tag waits to be received."""
        with self._lock:
            return bool(self._messages[tag])


class SelfSend:
    """The handle of a send to oneself: done."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Nothing to wait for."""

    def is_completed(self) -> bool:
        """Always."""
        return True

    def exception(self) -> None:
        """Nothing can go wrong."""


class SelfReceive:
    """The handle of a receive from oneself."""

    def __init__(self, target: torch.Tensor, rank: int, timeout_s: float) -> None:
        self._target = target
        self._rank = rank
        self._timeout_s = timeout_s
        self._ended = threading.Event()
        self._error: Exception | None = None

    def deliver(self, message: torch.Tensor) -> None:
        """Copy the message to where it belongs, and end."""
        target = self._target
        if message.dtype != target.dtype or message.numel() != target.numel():
            self._error = MismatchError(
                f"rank {self._rank} sent itself {message.numel()} elements of {message.dtype}, "
                f"but receives {target.numel()} of {target.dtype}"
            )
        else:
            with torch.no_grad():
                target.copy_(message.view(target.shape))
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the message; returns this rank, where it came from."""
        if not self._ended.wait(self._timeout_s if timeout_s is None else timeout_s):
            if timeout_s is not None:
                raise TimeoutError(f"the call is still under way after {timeout_s:g} s")
            raise CollectiveTimeoutError(
                f"rank {self._rank} has sent itself nothing for {self._timeout_s:g} s"
            )
        if self._error is not None:
            raise self._error
        return self._rank

    def is_completed(self) -> bool:
        """Whether the message has come."""
        return self._ended.is_set()

    def exception(self) -> Exception | None:
        """What was wrong with the message."""
        return self._error

    def source_rank(self) -> int:
        """This rank."""
        return self._rank


hide_from_dynamo(Loopback, SelfSend, SelfReceive)
