"""What ties ranks of several hosts to each other after their group has failed.

Texts go from porter to porter. The ledger of the agreement has no memory that all can read: it is
kept by the votes of the old group's ranks (`links/vote.py`), each with its porter. A rank goes on
only with what its own vote was given for, so that whoever asks all who live learns of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from unisono import native
from unisono.errors import AbortedError, RendezvousError
from unisono.links.porter import Porter
from unisono.links.post import Answered, Quit, Text, Unreached, Voted
from unisono.links.vote import Ask, Step, Vote
from unisono.runtime import agreement
from unisono.runtime.quorum import suffices
from unisono.runtime.rendezvous import Meeting, Met
from unisono.runtime.succession import Succession

_VOTE_S = 10.0
"""Porters answer at once, unless their processes are stopped."""

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
        self._answers: list[tuple[int, Answered]] = []
        self._ended: set[int] = set()
        self._unreached: set[int] = set()
        self._quit: set[int] = set()
        self._finished = False
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
                case Answered(source=source) if source in self._places:
                    self._answers.append((self._places[source], news))
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
        ballot = desired // 2
        if agreement.decided(desired):
            return expected if self._choose(ballot, ballot) else self._entry()
        votes = self._ask_all(Ask(step=Step.PROMISE, ballot=ballot))
        if votes is None:
            return self._entry()
        latest = max(votes, key=lambda vote: vote.ballot)
        if not latest.choice:
            return expected
        # That may be decided already, and must be what is decided.
        chosen = self._choose(ballot, latest.choice)
        return agreement.undecided(latest.choice) + 1 if chosen else self._entry()

    def _entry(self) -> int:
        if self._vote.decided:
            return agreement.undecided(self._vote.choice) + 1
        return agreement.undecided(max(self._vote.promised, self._highest))

    def _choose(self, ballot: int, choice: int) -> bool:
        if self._ask_all(Ask(step=Step.CHOOSE, ballot=ballot, choice=choice)) is None:
            return False
        for rank in [self._rank, *self._others]:
            known = Ask(step=Step.KNOW, ballot=ballot, choice=choice)
            self._porter.ask(self._name, self._members[rank], known)
        return True

    def _ask_all(self, ask: Ask) -> list[Vote] | None:
        """The votes of enough ranks, this one's first; None if one is promised to a later ballot.

        Its own first: who asks all that live later on finds there what others were asked for.
        """
        votes: dict[int, Vote] = {}
        deadline = time.monotonic() + _VOTE_S
        asked = [self._rank]
        self._porter.ask(self._name, self._members[self._rank], ask)
        while True:
            for rank, news in self._answers:
                answer = news.answer
                if (answer.step, answer.asked) != (ask.step, ask.ballot):
                    continue  # to an earlier question
                if not answer.yes:
                    self._highest = max(self._highest, answer.vote.promised)
                    self._answers.clear()
                    return None
                votes[rank] = answer.vote
            self._answers.clear()
            if self._rank in votes and len(asked) == 1:
                asked += self._others
                for rank in sorted(self._voters - {self._rank}):
                    self._porter.ask(self._name, self._members[rank], ask)
            if self._rank in votes and suffices(votes.keys(), self._ended, self._voters):
                return list(votes.values())
            silent = self._voters - votes.keys() - self._ended
            if silent <= self._unreached or time.monotonic() > deadline:
                raise AbortedError(self._too_few(sorted(votes), sorted(silent)))
            self._read(0.05)

    def _too_few(self, yes: list[int], silent: list[int]) -> str:
        voters = sorted(self._voters)
        return _TOO_FEW.format(
            rank=self._rank, voters=voters, yes=yes, silent=silent, lowest=voters[0]
        )

    # ---- the next group

    def form(self, succession: Succession, ballot: int, members: tuple[int, ...]) -> Met:
        """Meets the members as the ranks of a world do, but watches them."""

        def watch() -> None:
            lost = self.keep_up() & frozenset(members)
            if lost:
                raise RendezvousError(f"lost while the group was being formed: {sorted(lost)}")
            if self._entry() != agreement.undecided(ballot):
                raise RendezvousError("another group is being formed")

        meeting = Meeting(
            rank=members.index(succession.rank),
            size=len(members),
            rendezvous=f"shrink-{succession.name}-{ballot}",
            timeout_s=succession.timeout_s,
            staging_bytes=succession.staging_bytes,
            word=succession.word,
            watch=watch,
        )
        return self._form(meeting, [self._members[rank] for rank in members])
