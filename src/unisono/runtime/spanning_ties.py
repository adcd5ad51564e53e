"""What ties ranks of several hosts to each other after their group has failed.

Texts go from porter to porter. The ledger of the agreement has no memory that all can read: it is
kept by the votes of the old group's ranks (`links/vote.py`), each with its porter. A rank goes on
only with what its own vote was given for, so that whoever asks all who live learns of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from unisono import native
from unisono.errors import AbortedError
from unisono.links.porter import Porter
from unisono.links.post import Answered, Quit, Text, Unreached, Voted
from unisono.links.vote import Answer, Vote
from unisono.runtime import agreement
from unisono.runtime.quorum import Poll
from unisono.runtime.rendezvous import Meeting, Met
from unisono.runtime.succession import Succession, meeting_of

_VOTE_S = 5.0
"""Porters answer at once, unless their processes are stopped; this long after the last answer, for
where many ranks share a core, they come one by one."""

_LOOK_S = 0.05

_TOO_FEW = (
    "rank {rank} cannot go on: of ranks {voters} it reaches {yes}, and {silent} may live on beyond "
    "a cut and go on there. It takes more than half of them, or half with rank {lowest}, or the "
    "certainty that all others have ended; ranks that you know to have ended can be left out by "
    "shrink(exclude={silent})"
)


class SpanningTies:
    """`members` are the group's ranks in the world; `form` makes a group of some of the world's
    ranks."""

    def __init__(
        self,
        porter: Porter,
        group: native.Group,
        succession: Succession,
        name: bytes,
        members: Sequence[int],
        form: Callable[[Meeting, Sequence[int]], Met],
    ) -> None:
        self._porter, self._group, self._name = porter, group, name
        self._rank, self._members, self._form = succession.rank, tuple(members), form
        self._places = {member: rank for rank, member in enumerate(members)}
        self._others = [rank for rank in range(len(members)) if rank != self._rank]
        self._voters = frozenset(range(len(members))) - succession.exclude
        self._vote = Vote()
        self._highest = 0  # ballot that was heard of
        self._texts: list[tuple[int, bytes]] = []
        self._answers: list[tuple[int, Answer]] = []
        self._ended: set[int] = set()
        self._unreached: set[int] = set()
        self._quit: set[int] = set()
        self._box = porter.open_box(name, [members[rank] for rank in self._others])

    def close(self, *, finished: bool) -> None:
        """The end of it; who has not `finished` tells the others not to wait."""
        self._porter.shut_box(self._name, quits=not finished)

    # ---- texts

    def send(self, to: int, data: bytes) -> None:
        """Sends a text, if that rank is within reach."""
        self._porter.send(self._name, self._members[to], data)

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """What has come, by whom."""
        self._read(0 if self._texts else timeout_s)
        texts, self._texts = self._texts, []
        return texts

    def keep_up(self) -> frozenset[int]:
        """Who has ended, has left the group, has given up, or is out of reach."""
        self._read(0)
        left = {rank for rank in self._others if not self._group.present(rank)}
        return frozenset(left | self._quit | self._unreached)

    def _read(self, timeout_s: float) -> None:
        for news in self._box.take(timeout_s):
            match news:
                case Text(source=source, data=data) if source in self._places:
                    self._texts.append((self._places[source], data))
                case Answered(source=source, answer=answer) if source in self._places:
                    self._answers.append((self._places[source], answer))
                case Voted(vote=vote):
                    self._vote = vote
                case Unreached(rank=member, ended=ended) if member in self._places:
                    self._unreached.add(self._places[member])
                    if ended:
                        self._ended.add(self._places[member])
                case Quit(rank=member) if member in self._places:
                    self._quit.add(self._places[member])

    # ---- the ledger

    def advance(self, expected: int, desired: int) -> int:
        """Moves the ledger if it is at `expected`; where it was. Raises `AbortedError` if too few
        can be reached to decide anything."""
        self._read(0)
        if expected == desired:
            return self._entry()
        poll = Poll(self._rank, self._voters, expected, desired)
        deadline = time.monotonic() + _VOTE_S
        while True:
            for rank, ask in poll.asks:
                self._porter.ask(self._name, self._members[rank], ask)
            poll.asks.clear()
            if self._answers:
                deadline = time.monotonic() + _VOTE_S
            for rank, answer in self._answers:
                poll.hear(rank, answer)
            self._answers.clear()
            poll.settle(self._ended)
            if poll.seen is not None:
                return self._settled(poll, poll.seen)
            if poll.asks:
                continue
            silent = self._voters - poll.votes - self._ended
            if silent <= self._unreached or time.monotonic() > deadline:
                raise AbortedError(self._too_few(sorted(poll.votes), sorted(silent)))
            self._read(_LOOK_S)

    def _settled(self, poll: Poll, seen: int) -> int:
        if poll.decision is not None:
            for member in self._members:
                self._porter.ask(self._name, member, poll.decision)
        elif not agreement.decided(seen):
            self._highest = max(self._highest, seen // 2)
        return seen

    def _entry(self) -> int:
        if self._vote.decided:
            return agreement.undecided(self._vote.choice) + 1
        return agreement.undecided(max(self._vote.promised, self._highest))

    def _too_few(self, yes: list[int], silent: list[int]) -> str:
        voters = sorted(self._voters)
        return _TOO_FEW.format(
            rank=self._rank, voters=voters, yes=yes, silent=silent, lowest=voters[0]
        )

    # ---- the next group

    def form(self, succession: Succession, ballot: int, members: tuple[int, ...]) -> Met:
        """Meets the members as the ranks of a world do."""
        meeting = meeting_of(self, succession, ballot, members)
        return self._form(meeting, [self._members[rank] for rank in members])
