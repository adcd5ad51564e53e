"""Queries at the control server, by which ranks learn the most recent call of each rank.

Many ranks may query at once, and repeatedly. The server asks each rank of a group at most four
times a second. Each querying rank receives only calls that it has not received yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.rank_connections.control_messages import (
    CALLED_BYTES,
    ControlMessage,
    MessageKind,
    pack_last_calls,
)
from unisono.transport import EventLoop, Timer

QUERY_INTERVAL_S = 0.25
_GATHER_S = 0.02
_FORGET_S = 60.0

Send = Callable[[int, ControlMessage], None]


@dataclass(slots=True, kw_only=True)
class _Answers:
    """Known most recent calls of one group's ranks. `version` increases when a rank's call
    changes.
    """

    version: int = 0
    latest: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by rank: version, call
    askers: dict[int, float] = field(default_factory=dict)  # time of the last query, by asking rank
    sent: dict[int, int] = field(default_factory=dict)  # last version sent, by asking rank
    members: tuple[int, ...] = ()
    asked_at: float = float("-inf")
    next_round: Timer | None = None
    report: Timer | None = None


class LastCallQueries:
    """Collects the most recent calls of ranks, by group, on the server's rank `rank`. `send` sends
    a message to a rank.
    """

    def __init__(self, loop: EventLoop, rank: int, send: Send) -> None:
        self._loop, self._rank, self._send = loop, rank, send
        self._groups: dict[bytes, _Answers] = {}

    def query(self, message: ControlMessage) -> None:
        """Handles a query of a rank, which also contains that rank's own most recent call."""
        now = time.monotonic()
        self._forget(now)
        known = self._groups.setdefault(message.tag, _Answers())
        known.members = message.to
        known.askers[message.origin] = now
        self._note(known, message.origin, message.body)
        wait_s = known.asked_at + QUERY_INTERVAL_S - now
        if wait_s <= 0:
            self._round(message.tag)
        elif known.next_round is None:
            known.next_round = self._loop.later(wait_s, lambda: self._round(message.tag))
        self._report_soon(message.tag, known)

    def answer(self, message: ControlMessage, called: list[tuple[int, bytes]]) -> None:
        """Records the answering rank's own call. Ignores calls of other ranks in the answer."""
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
            # skip a rank that queried recently, since its query contained its call
            if now - known.askers.get(rank, float("-inf")) > QUERY_INTERVAL_S / 2:
                self._send(
                    rank,
                    ControlMessage(kind=MessageKind.LAST_CALL_QUERY, origin=self._rank, tag=tag),
                )

    def _report_soon(self, tag: bytes, known: _Answers) -> None:
        if known.report is None:
            known.report = self._loop.later(_GATHER_S, lambda: self._report(tag))

    def _report(self, tag: bytes) -> None:
        known = self._groups[tag]
        known.report = None
        now = time.monotonic()
        known.askers = {r: at for r, at in known.askers.items() if now - at < 2 * QUERY_INTERVAL_S}
        for asker in known.askers:
            sent = known.sent.get(asker, 0)
            unsent = [
                (rank, called)
                for rank, (version, called) in known.latest.items()
                if version > sent and rank != asker
            ]
            known.sent[asker] = known.version
            for body in pack_last_calls(unsent):
                self._send(
                    asker,
                    ControlMessage(
                        kind=MessageKind.LAST_CALLS, origin=self._rank, tag=tag, body=body
                    ),
                )

    def _forget(self, now: float) -> None:
        old = [
            tag
            for tag, known in self._groups.items()
            if now - known.asked_at > _FORGET_S and known.report is None
        ]
        for tag in old:
            del self._groups[tag]
