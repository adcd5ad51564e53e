"""What passes between ranks while they shrink a group: texts, and their votes.

Straight from porter to porter, for the star may have lost its middle; then what is told of groups
goes this way, too. A rank dials whom it writes to; answers of votes come back on the same
connection. Texts wait here for a rank that has not come to shrink
yet; the vote answers for it at once, and for as long as the porter lives.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TypeAlias

from unisono.links.dialing import Dial, Failed
from unisono.links.introduction import Introduction, Kind
from unisono.links.line import Line
from unisono.links.messages import Message, Say
from unisono.links.place import Place
from unisono.links.vote import Answer, Ask, Step, Vote, cast, read_answer, read_ask

_MOST_WAITING = 4096  # news for a group that nobody shrinks here yet
_PROCESS_S = 5.0  # a host that answers, and a process that does not: dialed again
_BETWEEN_DIALS_S = 0.02

_OF_GROUPS = (Say.FAILED, Say.LOOK, Say.LOOKED)
_NOBODY = (1 << 32) - 1  # whose ballot it was does not matter any more

# ---- news for the rank that shrinks; ranks are the world's


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Of another rank that shrinks."""

    source: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A vote, this rank's own too."""

    source: int
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Voted:
    """This rank's own vote, after each change."""

    vote: Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """A rank is out of reach: because it has `ended` for certain, or nobody knows why."""

    rank: int
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """Another rank gave up shrinking."""

    rank: int


News: TypeAlias = Text | Answered | Voted | Unreached | Quit


class Box:
    """Where a rank that shrinks finds its news."""

    def __init__(self) -> None:
        self._news: SimpleQueue[News] = SimpleQueue()

    def put(self, news: News) -> None:
        """From the loop's thread."""
        self._news.put(news)

    def take(self, timeout_s: float) -> list[News]:
        """What there is; waits at most `timeout_s` for the first."""
        found: list[News] = []
        try:
            found.append(self._news.get(timeout_s > 0, timeout_s))
            while True:
                found.append(self._news.get_nowait())
        except Empty:
            return found


# ---- the links' side, all for the loop's thread


class Post:
    """All that a porter has to do with the shrinking of groups, by tag."""

    def __init__(self, place: Place, hear: Callable[[Message], None]) -> None:
        """`hear` takes what is about a group that does not shrink."""
        self._place, self._hear = place, hear
        self._rank = place.terms.rank
        self._ways: dict[int, _Way] = {}
        self._lines: set[Line] = set()
        self._boxes: dict[bytes, Box] = {}
        self._votes: dict[bytes, Vote] = {}
        self._waiting: deque[tuple[bytes, News]] = deque(maxlen=_MOST_WAITING)

    def open(self, tag: bytes, peers: tuple[int, ...], box: Box) -> None:
        """This rank begins to shrink a group; `peers` are its other ranks."""
        self._boxes[tag] = box
        box.put(Voted(vote=self._vote(tag)))
        for waiting in [waiting for waiting in self._waiting if waiting[0] == tag]:
            self._waiting.remove(waiting)
            box.put(waiting[1])
        for rank in peers:
            self._way(rank)

    def shut(self, tag: bytes, *, quits: bool) -> None:
        """It has ended that; if it `quits`, all who can be told are told not to wait for it."""
        self._boxes.pop(tag, None)
        if quits:
            for rank in list(self._ways):
                self._tell(tag, rank, Say.LEFT, b"")

    def tell(self, message: Message) -> None:
        """Brings a message of a group to other ranks, where no star does. That a rank has left they
        see by its connections."""
        if message.say in _OF_GROUPS:
            for rank in message.to:
                if rank != self._rank:
                    self._way(rank).say(replace(message, to=()))

    def send(self, tag: bytes, to: int, data: bytes) -> None:
        """A text for another rank, which gets it when it shrinks too. Not if it is out of reach."""
        self._tell(tag, to, Say.POST, data)

    def ask(self, tag: bytes, to: int, ask: Ask) -> None:
        """Asks a rank's vote, or this one's; an answer is news."""
        if to != self._rank:
            self._tell(tag, to, Say.ASK, ask.pack())
            return
        answer = self._cast(tag, ask)
        if tag in self._boxes:
            self._boxes[tag].put(Answered(source=to, answer=answer))

    def take(self, sock: socket.socket, said: Introduction) -> None:
        """Another rank dials."""

        def heard(message: Message) -> None:
            self.heard(said.rank, message, line)

        line = Line(
            self._place.loop,
            sock,
            self._place.terms.peer_timeout_s,
            heard=heard,
            ended=lambda _: self._lines.discard(line),
        )
        self._lines.add(line)

    def close(self) -> None:
        """Closes all connections."""
        for way in list(self._ways.values()):
            way.close()
        for line in list(self._lines):
            line.close()

    def unreached(self, rank: int, *, ended: bool) -> None:
        """Of a way to a rank."""
        self._ways.pop(rank, None)
        for box in self._boxes.values():
            box.put(Unreached(rank=rank, ended=ended))

    def heard(self, rank: int, message: Message, line: Line) -> None:
        """From a rank, by a line. Raises `ValueError` for what makes no sense."""
        if message.origin != rank:
            raise ValueError(f"a message of rank {message.origin} from rank {rank}")
        box = self._boxes.get(message.tag)
        match message.say:
            case say if say in _OF_GROUPS:
                self._hear(message)
            case Say.ASK:
                self._asked(message, line)
            case Say.POST:
                self._deliver(message, line)
            case Say.ANSWER if box is not None:
                box.put(Answered(source=rank, answer=read_answer(message.body)))
            case Say.LEFT:
                self._put(message.tag, Quit(rank=rank))
            case Say.ANSWER:
                pass  # came late
            case _:
                raise ValueError(f"a message of kind {message.say} by post")

    def _asked(self, message: Message, line: Line) -> None:
        ask = read_ask(message.body)
        answer = self._cast(message.tag, ask)
        if ask.step is not Step.KNOW:
            line.say(self._message(message.tag, Say.ANSWER, answer.pack()))

    def _deliver(self, message: Message, line: Line) -> None:
        vote = self._vote(message.tag)
        if vote.decided and message.tag not in self._boxes:  # it comes when all is over
            known = Ask(step=Step.KNOW, rank=_NOBODY, ballot=vote.ballot, choice=vote.choice)
            line.say(self._message(message.tag, Say.ASK, known.pack()))
        else:
            self._put(message.tag, Text(source=message.origin, data=message.body))

    def _put(self, tag: bytes, news: News) -> None:
        if tag in self._boxes:
            self._boxes[tag].put(news)
        else:
            self._waiting.append((tag, news))

    def _vote(self, tag: bytes) -> Vote:
        return self._votes.get(tag, Vote())

    def _cast(self, tag: bytes, ask: Ask) -> Answer:
        self._votes[tag], answer = cast(self._vote(tag), ask)
        if tag in self._boxes:
            self._boxes[tag].put(Voted(vote=answer.vote))
        return answer

    def _tell(self, tag: bytes, to: int, say: Say, body: bytes) -> None:
        if to in self._ways:
            self._ways[to].say(self._message(tag, say, body))

    def _way(self, to: int) -> _Way:
        if to not in self._ways:
            self._ways[to] = _Way(self, self._place, to)
        return self._ways[to]

    def _message(self, tag: bytes, say: Say, body: bytes) -> Message:
        return Message(say=say, origin=self._rank, tag=tag, body=body)


class _Way:
    """To one rank: a dial, then a line. Of a line that ends only another dial tells what that
    means: a host that refuses says that the process has ended; all else may pass."""

    def __init__(self, post: Post, place: Place, rank: int) -> None:
        self._post, self._place, self._rank = post, place, rank
        self._pending: list[Message] = []
        self._line: Line | None = None
        self._was_lost = self._is_closed = False
        self._since_s = time.monotonic()
        self._dial = self._begin()

    def say(self, message: Message) -> None:
        if self._line is None:
            self._pending.append(message)
        elif message.say is Say.ASK:
            self._line.ask(message)
        else:
            self._line.say(message)

    def close(self) -> None:
        self._is_closed = True
        self._dial.cancel()
        if self._line is not None:
            self._line.close()

    def _begin(self) -> Dial:
        said = Introduction(kind=Kind.POST, rank=self._place.terms.rank, pid=os.getpid())
        return self._place.dial(
            self._rank,
            0,
            said,
            host_s=self._place.terms.peer_timeout_s,
            process_s=_PROCESS_S,
            opened=self._opened,
            # Later: a dial may fail before it is made.
            failed=self._fail_soon,
        )

    def _opened(self, sock: socket.socket) -> None:
        if self._was_lost:  # and what was on its way is lost too
            sock.close()
            self._post.unreached(self._rank, ended=False)
            return
        self._line = Line(
            self._place.loop,
            sock,
            self._place.terms.peer_timeout_s,
            heard=self._heard,
            ended=self._ended,
        )
        for message in self._pending:
            self.say(message)
        self._pending.clear()

    def _heard(self, message: Message) -> None:
        assert self._line is not None
        self._post.heard(self._rank, message, self._line)

    def _ended(self, _: str) -> None:
        self._was_lost = True
        self._since_s = time.monotonic()
        self._line = None
        self._dial = self._begin()

    def _fail_soon(self, failed: Failed) -> None:
        delay_s = _BETWEEN_DIALS_S if failed.false else 0
        self._place.loop.later(delay_s, lambda: self._failed(failed))

    def _failed(self, failed: Failed) -> None:
        # Its host lives: perhaps it is stopped. Or it ended while it was to prove itself, which
        # looks as if it took this rank's proof for wrong; then the next dial is refused.
        is_early = time.monotonic() - self._since_s < _PROCESS_S
        if self._is_closed:
            return
        if (failed.answered and not self._was_lost) or (failed.false and is_early):
            self._dial = self._begin()
        else:
            self._post.unreached(self._rank, ended=failed.refused)
