"""Recorded sends and receives of a test, and MPI's rules for matching them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(kw_only=True, eq=False)
class Message:
    """A send that has begun; `number` is its position in the order in which all sends and receives
    began.
    """

    number: int
    src: int
    dst: int
    tag: int
    content: bytes
    work: Any
    withdrawn: bool = False
    over: bool = False  # True if the request has ended and has been started again


@dataclass(kw_only=True, eq=False)
class Receive:
    number: int
    rank: int
    src: int | None
    tag: int | None
    memory: np.ndarray
    work: Any
    found: tuple[int, int] | None = None  # source and tag that a preceding probe returned
    cancelled: bool = False
    outcome: tuple[int, int, bytes] | None = None  # source, tag, content
    got: Message | None = None

    def wants(self, message: Message) -> bool:
        return fits(self.src, self.tag, message)

    def look(self) -> bool:
        """Returns True if the receive has just ended."""
        if self.cancelled or self.outcome is not None or not self.work.test():
            return False
        self.work.wait()
        source, tag = self.work.source_rank(), self.work.tag()
        assert self.found in (None, (source, tag)), (
            f"{self} received another message than the probe found"
        )
        self.outcome = source, tag, self.memory.tobytes()
        return True


def fits(src: int | None, tag: int | None, message: Message) -> bool:
    return src in (None, message.src) and tag in (None, message.tag)


@dataclass
class History:
    messages: list[Message] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    asked: set[tuple[int, int | None, int]] = field(default_factory=set)
    """Probes so far, as (rank, source, tag). After a probe has found a message, a receive of any
    tag may get this message before earlier ones that are held back.
    """

    def must_have_come(self, rank: int, src: int | None, tag: int | None) -> bool:
        """Returns True if more matching messages were sent than all receives together can have
        received.
        """
        there = [m for m in self.to(rank) if fits(src, tag, m)]
        takers = [r for r in self.of(rank) if any(r.wants(m) for m in there)]
        return len(there) > len(takers)

    def to(self, rank: int) -> list[Message]:
        return [m for m in self.messages if m.dst == rank and not m.withdrawn]

    def of(self, rank: int) -> list[Receive]:
        return [r for r in self.receives if r.rank == rank and not r.cancelled]

    def pending(self) -> tuple[Receive, Message] | None:
        """Returns a pending receive and a message that matches it, or None."""
        taken: set[Message] = set()
        for receive in self.receives:
            if receive.outcome is not None:
                self._settle(receive, taken)
        for receive in self.receives:
            if receive.outcome is None and not receive.cancelled:
                for message in self.to(receive.rank):
                    if message not in taken and receive.wants(message):
                        return receive, message
        return None

    def check(self, ranks: int) -> None:
        pending = self.pending()
        assert pending is None, f"{pending[0]} waits although {pending[1]} matches it"
        for rank in range(ranks):
            receives, messages = self.of(rank), self.to(rank)
            for receive in receives:
                if receive.got is not None:
                    self._check_order(receive, receive.got, receives, messages)
                    continue
                later = [r for r in receives if r.got and receive.wants(r.got)]
                assert all(r.number < receive.number for r in later), f"{receive} was overtaken"

    def _settle(self, receive: Receive, taken: set[Message]) -> None:
        """Finds the message that a receive has received, by source, tag and content.

        Messages without bytes have equal contents. They are matched in the order of sending, as
        MPI's rules require.
        """
        assert receive.outcome is not None
        source, tag, content = receive.outcome
        alike = [m for m in self.to(receive.rank) if (m.src, m.tag) == (source, tag)]
        found = (m for m in alike if m.content == content and m not in taken)
        receive.got = next(found, None)
        assert receive.got is not None, f"{receive} received a message that no rank sent"
        assert receive.wants(receive.got), f"{receive} received a message that does not match it"
        taken.add(receive.got)

    def _check_order(
        self, receive: Receive, got: Message, receives: list[Receive], messages: list[Message]
    ) -> None:
        """Checks the order that MPI 4.1 requires in section 3.5.

        Of two messages of one rank that match a receive, the receive gets the first. Of two
        receives that match a message, the first gets it.
        """
        if receive.tag is None and self._was_asked_for(got):
            return
        for message in messages:
            if message.src != got.src or message.number >= got.number or not receive.wants(message):
                continue
            taker = next((r for r in receives if r.got is message), None)
            assert taker is not None and taker.number < receive.number, (
                f"{receive} has overtaken {message}"
            )

    def _was_asked_for(self, message: Message) -> bool:
        return any((message.dst, s, message.tag) in self.asked for s in (None, message.src))
