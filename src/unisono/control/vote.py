"""A host's vote on what succeeds a failed group, and how it is asked for.

What one word of shared memory decides on one host is decided across hosts by the votes of the old
group's hosts: single-decree Paxos (Lamport, Paxos Made Simple, 2001). A ballot asks for promises
first, then for a choice: the group formed under a ballot, this one or an earlier one. A vote is one
word of the segment that the ranks of a host share, so any rank of the host that lives can answer
for all of them, and none can answer otherwise than another did.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

_ASK = struct.Struct("<BII")
_ANSWER = struct.Struct("<?Q")
_BALLOT_BITS = 21
END_OF_BALLOTS: Final = 1 << _BALLOT_BITS
"""Ballots have lower numbers: three of them fit into a vote's word."""

Exchange = Callable[[int, int], int]
"""Moves a word if it is at the first number to the second; returns where it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """`promised`: nothing of a lower ballot counts. `choice` was taken under `ballot` (0: none),
    and if `decided`, by enough others too."""

    promised: int = 0
    ballot: int = 0
    choice: int = 0
    decided: bool = False

    @classmethod
    def of(cls, word: int) -> Vote:
        """The vote in a word of memory.

        >>> vote = Vote(promised=9, ballot=7, choice=5, decided=True)
        >>> Vote.of(vote.word) == vote, Vote.of(0) == Vote()
        (True, True)
        """
        promised, ballot, choice = (
            word >> (1 + place * _BALLOT_BITS) & (END_OF_BALLOTS - 1) for place in range(3)
        )
        return cls(promised=promised, ballot=ballot, choice=choice, decided=bool(word & 1))

    @property
    def word(self) -> int:
        """As a word of memory."""
        fields = (self.promised, self.ballot, self.choice)
        return self.decided + sum(
            field << (1 + place * _BALLOT_BITS) for place, field in enumerate(fields)
        )


class VotePhase(IntEnum):
    """What is asked of a vote."""

    PROMISE = 1
    CHOOSE = 2
    KNOW = 3  # that this choice is decided; not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteRequest:
    """A question of the rank whose ballot it is."""

    step: VotePhase
    ballot: int
    choice: int = 0

    def pack(self) -> bytes:
        """As bytes."""
        return _ASK.pack(self.step, self.ballot, self.choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteReply:
    """To a question: yes or no, and the vote as it is now."""

    to: VoteRequest
    yes: bool
    vote: Vote

    def pack(self) -> bytes:
        """As bytes."""
        return _ANSWER.pack(self.yes, self.vote.word) + self.to.pack()


def cast(vote: Vote, ask: VoteRequest) -> tuple[Vote, VoteReply]:
    """The vote after a question, and the answer.

    >>> vote, answer = cast(Vote(), VoteRequest(step=VotePhase.CHOOSE, ballot=5, choice=5))
    >>> answer.yes, cast(vote, VoteRequest(step=VotePhase.PROMISE, ballot=4))[1].yes
    (True, False)
    """
    if ask.step is VotePhase.KNOW:  # whatever was promised since
        latest, promised = max(vote.ballot, ask.ballot), max(vote.promised, ask.ballot)
        vote = Vote(promised=promised, ballot=latest, choice=ask.choice, decided=True)
        return vote, VoteReply(to=ask, yes=True, vote=vote)
    yes = ask.ballot >= vote.promised
    if yes:
        vote = replace(vote, promised=ask.ballot)
        if ask.step is VotePhase.CHOOSE:
            vote = replace(vote, ballot=ask.ballot, choice=ask.choice)
    return vote, VoteReply(to=ask, yes=yes, vote=vote)


def cast_in(exchange: Exchange, ask: VoteRequest) -> VoteReply:
    """The same for the vote in a word that other ranks move too."""
    seen = exchange(0, 0)
    while True:
        vote, answer = cast(Vote.of(seen), ask)
        before, seen = seen, exchange(seen, vote.word)
        if seen == before:
            return answer


def read_ask(body: bytes) -> VoteRequest:
    """Raises `ValueError`.

    >>> read_ask(VoteRequest(step=VotePhase.CHOOSE, ballot=5, choice=3).pack()).choice
    3
    """
    if len(body) != _ASK.size:
        raise ValueError(f"a question of {len(body)} bytes")
    step, ballot, choice = _ASK.unpack(body)
    if not 0 < ballot < END_OF_BALLOTS or not 0 <= choice <= ballot:
        raise ValueError(f"a question for choice {choice} under ballot {ballot}")
    return VoteRequest(step=VotePhase(step), ballot=ballot, choice=choice)


def read_answer(body: bytes) -> VoteReply:
    """Raises `ValueError`."""
    if len(body) != _ANSWER.size + _ASK.size:
        raise ValueError(f"an answer of {len(body)} bytes")
    yes, word = _ANSWER.unpack_from(body)
    vote = Vote.of(word)
    if not vote.choice <= vote.ballot <= vote.promised:
        raise ValueError(f"a vote for {vote.choice} under {vote.ballot}, to {vote.promised}")
    return VoteReply(to=read_ask(body[_ANSWER.size :]), yes=yes, vote=vote)
