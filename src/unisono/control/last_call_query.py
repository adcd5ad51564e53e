"""Last-call queries at the control server: which call did each rank make last?

Many ranks may query at once, and repeatedly. Each rank of a group is asked at most four times a
second, and each asking rank receives only calls that it has not received yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.control.messages import CALLED_BYTES, ControlMessage, MessageKind, looked_bodies
from unisono.transport import EventLoop, Timer

EACH_S = 0.25
_GATHER_S = 0.02
_FORGET_S = 60.0

Tell = Callable[[int, ControlMessage], None]


@dataclass(slots=True, kw_only=True)
class _Answers:
    """Known last calls of one group. The version counts answers that changed a call."""

    version: int = 0
    latest: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by rank, with version
    askers: dict[int, float] = field(default_factory=dict)  # time of the last query, by asking rank
    told: dict[int, int] = field(default_factory=dict)  # last version sent, by asking rank
    members: tuple[int, ...] = ()
    asked_at: float = float("-inf")
    next_round: Timer | None = None
    report: Timer | None = None


class LastCallQueries:
    """Collects last calls by group, on `rank`. `tell` sends a message to a rank."""

    def __init__(self, loop: EventLoop, rank: int, tell: Tell) -> None:
        self._loop, self._rank, self._tell = loop, rank, tell
        self._groups: dict[bytes, _Answers] = {}

    def ask(self, message: ControlMessage) -> None:
        """Handles a query, which also holds the sender's own last call."""
        now = time.monotonic()
        self._forget(now)
        known = self._groups.setdefault(message.tag, _Answers())
        known.members = message.to
        known.askers[message.origin] = now
        self._note(known, message.origin, message.body)
        wait_s = known.asked_at + EACH_S - now
        if wait_s <= 0:
            self._round(message.tag)
        elif known.next_round is None:
            known.next_round = self._loop.later(wait_s, lambda: self._round(message.tag))
        self._report_soon(message.tag, known)

    def answer(self, message: ControlMessage, called: list[tuple[int, bytes]]) -> None:
        """Handles a rank's answer, which counts only for that rank."""
        known = self._groups.get(message.tag)
        if known is not None:
            for rank, last in called:
                if rank == message.origin:
                    self._note(known, rank, last)
            self._report_soon(message.tag, known)

    def _note(self, known: _Answers, rank: int, called: bytes) -> None:
        if len(called) == CALLED_BYTES and known.latest.get(rank, (0, b""))[1] != called:
            known.version += 1
            known.latest[rank] = (known.version, called)

    def _round(self, tag: bytes) -> None:
        known = self._groups.get(tag)
        if known is None:
            return
        now = time.monotonic()
        if known.next_round is not None:
            known.next_round.cancel()
            known.next_round = None
        known.asked_at = now
        for rank in known.members:
            # else its own query said it
            if now - known.askers.get(rank, float("-inf")) > EACH_S / 2:
                self._tell(rank, ControlMessage(say=MessageKind.LOOK, origin=self._rank, tag=tag))

    def _report_soon(self, tag: bytes, known: _Answers) -> None:
        if known.report is None:
            known.report = self._loop.later(_GATHER_S, lambda: self._report(tag))

    def _report(self, tag: bytes) -> None:
        known = self._groups[tag]
        known.report = None
        now = time.monotonic()
        known.askers = {r: at for r, at in known.askers.items() if now - at < 2 * EACH_S}
        for asker in known.askers:
            told = known.told.get(asker, 0)
            news = [
                (rank, called)
                for rank, (version, called) in known.latest.items()
                if version > told and rank != asker
            ]
            known.told[asker] = known.version
            for body in looked_bodies(news):
                self._tell(
                    asker,
                    ControlMessage(say=MessageKind.LOOKED, origin=self._rank, tag=tag, body=body),
                )

    def _forget(self, now: float) -> None:
        old = [
            tag
            for tag, known in self._groups.items()
            if now - known.asked_at > _FORGET_S and known.report is None
        ]
        for tag in old:
            del self._groups[tag]
