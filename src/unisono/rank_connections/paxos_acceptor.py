"""A host's vote on the group that replaces a failed group, with the requests and replies.

On one host, one word of shared memory decides. Across hosts, the votes of the old group's hosts
decide: single-decree Paxos (Lamport, Paxos Made Simple, 2001). A ballot first requests promises,
then a choice: the group formed under this ballot or an earlier ballot. A vote is one word of the
segment that a host's ranks share. So any live rank of the host can reply for all its ranks, and all
replies of a host are consistent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

_REQUEST = struct.Struct("<BII")
_REPLY = struct.Struct("<?Q")
_BALLOT_BITS = 21
END_OF_BALLOTS: Final = 1 << _BALLOT_BITS
"""Upper bound of ballot numbers. Three such numbers fit into a vote's word."""

Exchange = Callable[[int, int], int]
"""A function that compares and exchanges a word: sets the word to the second argument if it equals
the first. Returns the previous value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A host's vote (Paxos). The host refuses requests of ballots with numbers below `promised`.

    `choice` was accepted under `ballot` (0: none). `decided` is True if enough other hosts accepted
    it, too.
    """

    promised: int = 0
    ballot: int = 0
    choice: int = 0
    decided: bool = False

    @classmethod
    def of(cls, word: int) -> Vote:
        """Unpacks a vote from a word of memory.

        >>> vote = Vote(promised=9, ballot=7, choice=5, decided=True)
        >>> Vote.of(vote.word) == vote, Vote.of(0) == Vote()
        (True, True)
        """
        promised, ballot, choice = (
            word >> (1 + world * _BALLOT_BITS) & (END_OF_BALLOTS - 1) for world in range(3)
        )
        return cls(promised=promised, ballot=ballot, choice=choice, decided=bool(word & 1))

    @property
    def word(self) -> int:
        """The vote packed into a word of memory."""
        fields = (self.promised, self.ballot, self.choice)
        return self.decided + sum(
            field << (1 + world * _BALLOT_BITS) for world, field in enumerate(fields)
        )


class VotePhase(IntEnum):
    """Kinds of vote request."""

    PROMISE = 1
    CHOOSE = 2
    DECIDED = 3  # tells that this choice is decided; gets no reply


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteRequest:
    """A request for a host's vote, from the rank that started the ballot (a numbered attempt to
    agree).
    """

    phase: VotePhase
    ballot: int
    choice: int = 0

    def pack(self) -> bytes:
        """Packs the request."""
        return _REQUEST.pack(self.phase, self.ballot, self.choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteReply:
    """Reply to a request: yes or no, and the vote after the request."""

    to: VoteRequest
    yes: bool
    vote: Vote

    def pack(self) -> bytes:
        """Packs the reply."""
        return _REPLY.pack(self.yes, self.vote.word) + self.to.pack()


def cast(vote: Vote, request: VoteRequest) -> tuple[Vote, VoteReply]:
    """Returns the vote after a request, and the reply.

    >>> vote, reply = cast(Vote(), VoteRequest(phase=VotePhase.CHOOSE, ballot=5, choice=5))
    >>> reply.yes, cast(vote, VoteRequest(phase=VotePhase.PROMISE, ballot=4))[1].yes
    (True, False)
    """
    if request.phase is VotePhase.DECIDED:  # a decision holds, whatever the host has promised since
        latest, promised = max(vote.ballot, request.ballot), max(vote.promised, request.ballot)
        vote = Vote(promised=promised, ballot=latest, choice=request.choice, decided=True)
        return vote, VoteReply(to=request, yes=True, vote=vote)
    yes = request.ballot >= vote.promised
    if yes:
        vote = replace(vote, promised=request.ballot)
        if request.phase is VotePhase.CHOOSE:
            vote = replace(vote, ballot=request.ballot, choice=request.choice)
    return vote, VoteReply(to=request, yes=yes, vote=vote)


def cast_in(exchange: Exchange, request: VoteRequest) -> VoteReply:
    """Applies a request to the vote in a shared word, which other ranks may change meanwhile.
    Returns the reply.
    """
    seen = exchange(0, 0)
    while True:
        vote, reply = cast(Vote.of(seen), request)
        before, seen = seen, exchange(seen, vote.word)
        if seen == before:
            return reply


def unpack_request(body: bytes) -> VoteRequest:
    """Unpacks a request. Raises `ValueError`.

    >>> unpack_request(VoteRequest(phase=VotePhase.CHOOSE, ballot=5, choice=3).pack()).choice
    3
    """
    if len(body) != _REQUEST.size:
        raise ValueError(f"a vote request of {len(body)} bytes: expected {_REQUEST.size}")
    phase, ballot, choice = _REQUEST.unpack(body)
    if not 0 < ballot < END_OF_BALLOTS or not 0 <= choice <= ballot:
        raise ValueError(f"a vote request for choice {choice} under ballot {ballot}")
    return VoteRequest(phase=VotePhase(phase), ballot=ballot, choice=choice)


def unpack_reply(body: bytes) -> VoteReply:
    """Unpacks a reply. Raises `ValueError`."""
    if len(body) != _REPLY.size + _REQUEST.size:
        raise ValueError(f"a vote reply of {len(body)} bytes: wrong length")
    yes, word = _REPLY.unpack_from(body)
    vote = Vote.of(word)
    if not vote.choice <= vote.ballot <= vote.promised:
        raise ValueError(f"inconsistent vote: {vote}")
    return VoteReply(to=unpack_request(body[_REPLY.size :]), yes=yes, vote=vote)
