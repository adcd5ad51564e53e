"""One rank's vote on what succeeds a failed group, and how it is asked for.

What one word of shared memory decides on one host is decided across hosts by the votes of the old
group's ranks: single-decree Paxos (Lamport, Paxos Made Simple, 2001). A ballot asks for promises
first, then for a choice: the group formed under a ballot, this one or an earlier one. A vote lies
with the rank's porter, which answers whatever the program is doing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum

_ASK = struct.Struct("<BQQ")
_VOTE = struct.Struct("<?QQQ?")
_MOST = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """`promised`: nothing of a lower ballot counts. `choice` was taken under `ballot` (0: none),
    and if `decided`, by enough others too."""

    promised: int = 0
    ballot: int = 0
    choice: int = 0
    decided: bool = False


class Step(IntEnum):
    """What is asked of a vote."""

    PROMISE = 1
    CHOOSE = 2
    KNOW = 3  # that this choice is decided; not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question of the rank that holds `ballot`."""

    step: Step
    ballot: int
    choice: int = 0

    def pack(self) -> bytes:
        """As bytes."""
        return _ASK.pack(self.step, self.ballot, self.choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To the question of a step of a ballot: yes or no, and the vote as it is now."""

    step: Step
    asked: int
    yes: bool
    vote: Vote

    def pack(self) -> bytes:
        """As bytes."""
        vote = self.vote
        return _ASK.pack(self.step, self.asked, 0) + _VOTE.pack(
            self.yes, vote.promised, vote.ballot, vote.choice, vote.decided
        )


def cast(vote: Vote, ask: Ask) -> tuple[Vote, Answer]:
    """The vote after a question, and the answer.

    >>> vote, answer = cast(Vote(), Ask(step=Step.CHOOSE, ballot=5, choice=5))
    >>> answer.yes, cast(vote, Ask(step=Step.PROMISE, ballot=4))[1].yes
    (True, False)
    """
    first = ask.step is Step.PROMISE
    yes = ask.ballot > vote.promised or (ask.ballot == vote.promised and not first)
    if yes:
        vote = replace(vote, promised=ask.ballot)
        if not first:
            decided = vote.decided or ask.step is Step.KNOW
            vote = replace(vote, ballot=ask.ballot, choice=ask.choice, decided=decided)
    return vote, Answer(step=ask.step, asked=ask.ballot, yes=yes, vote=vote)


def read_ask(body: bytes) -> Ask:
    """Raises `ValueError`.

    >>> read_ask(Ask(step=Step.CHOOSE, ballot=5, choice=3).pack()).choice
    3
    """
    if len(body) != _ASK.size:
        raise ValueError(f"a question of {len(body)} bytes")
    step, ballot, choice = _ASK.unpack(body)
    if not 0 < ballot < _MOST or not 0 <= choice <= ballot:
        raise ValueError(f"a question for choice {choice} under ballot {ballot}")
    return Ask(step=Step(step), ballot=ballot, choice=choice)


def read_answer(body: bytes) -> Answer:
    """Raises `ValueError`."""
    if len(body) != _ASK.size + _VOTE.size:
        raise ValueError(f"an answer of {len(body)} bytes")
    asked = read_ask(body[: _ASK.size])
    yes, promised, ballot, choice, decided = _VOTE.unpack_from(body, _ASK.size)
    if not choice <= ballot <= promised < _MOST:
        raise ValueError(f"a vote for {choice} under {ballot}, promised to {promised}")
    vote = Vote(promised=promised, ballot=ballot, choice=choice, decided=decided)
    return Answer(step=asked.step, asked=asked.ballot, yes=yes, vote=vote)
