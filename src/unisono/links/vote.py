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

_ASK = struct.Struct("<BQQI")
_VOTE = struct.Struct("<?QQQ?")
_RANK = struct.Struct("<I")
_MOST = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """`promised`: nothing of a lower ballot counts, nor what is still on its way of ranks that have
    `ended`. `choice` was taken under `ballot` (0: none), and if `decided`, by enough others too."""

    promised: int = 0
    ballot: int = 0
    choice: int = 0
    decided: bool = False
    ended: frozenset[int] = frozenset()


class Step(IntEnum):
    """What is asked of a vote."""

    PROMISE = 1
    CHOOSE = 2
    KNOW = 3  # that this choice is decided; not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question of `rank`, whose ballot it is; `ended`: who has, as it knows for certain."""

    step: Step
    rank: int
    ballot: int
    choice: int = 0
    ended: frozenset[int] = frozenset()

    def pack(self) -> bytes:
        """As bytes."""
        head = _ASK.pack(self.step, self.ballot, self.choice, self.rank)
        return head + b"".join(map(_RANK.pack, sorted(self.ended)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To a question: yes or no, and the vote as it is now."""

    to: Ask
    yes: bool
    vote: Vote

    def pack(self) -> bytes:
        """As bytes. Of the vote's `ended` only those of the question come through."""
        vote = self.vote
        packed = _VOTE.pack(self.yes, vote.promised, vote.ballot, vote.choice, vote.decided)
        return packed + self.to.pack()


def cast(vote: Vote, ask: Ask) -> tuple[Vote, Answer]:
    """The vote after a question, and the answer.

    >>> vote, answer = cast(Vote(), Ask(step=Step.CHOOSE, rank=1, ballot=5, choice=5))
    >>> answer.yes, cast(vote, Ask(step=Step.PROMISE, rank=0, ballot=4))[1].yes
    (True, False)
    """
    yes = ask.ballot >= vote.promised and ask.rank not in vote.ended
    if yes:
        vote = replace(vote, promised=ask.ballot, ended=vote.ended | ask.ended)
        if ask.step is not Step.PROMISE:
            decided = vote.decided or ask.step is Step.KNOW
            vote = replace(vote, ballot=ask.ballot, choice=ask.choice, decided=decided)
    return vote, Answer(to=ask, yes=yes, vote=vote)


def read_ask(body: bytes) -> Ask:
    """Raises `ValueError`.

    >>> read_ask(Ask(step=Step.CHOOSE, rank=1, ballot=5, choice=3).pack()).choice
    3
    """
    ended = body[_ASK.size :]
    if len(body) < _ASK.size or len(ended) % _RANK.size:
        raise ValueError(f"a question of {len(body)} bytes")
    step, ballot, choice, rank = _ASK.unpack_from(body)
    if not 0 < ballot < _MOST or not 0 <= choice <= ballot:
        raise ValueError(f"a question for choice {choice} under ballot {ballot}")
    ranks = frozenset(number for (number,) in _RANK.iter_unpack(ended))
    return Ask(step=Step(step), rank=rank, ballot=ballot, choice=choice, ended=ranks)


def read_answer(body: bytes) -> Answer:
    """Raises `ValueError`."""
    if len(body) < _VOTE.size:
        raise ValueError(f"an answer of {len(body)} bytes")
    ask = read_ask(body[_VOTE.size :])
    yes, promised, ballot, choice, decided = _VOTE.unpack_from(body)
    if not choice <= ballot <= promised < _MOST:
        raise ValueError(f"a vote for {choice} under {ballot}, promised to {promised}")
    vote = Vote(promised=promised, ballot=ballot, choice=choice, decided=decided)
    return Answer(to=ask, yes=yes, vote=vote)
