"""How one rank moves a ledger that is made of votes, and when those that it has suffice.

A ledger's word moves to a ballot's number when enough ranks promise to count nothing lower, and to
a decision when enough choose the group formed under it. Two such sets always have a rank in common,
so a ballot finds what an earlier one may have decided, and then can only decide the same.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from unisono.links.vote import Answer, Ask, Step, Vote
from unisono.runtime.agreement import decided, undecided


def suffices(yes: Set[int], ended: Set[int], voters: Set[int]) -> bool:
    """Whether the ranks `yes` of `voters` may decide; of the others `ended` have ended for certain.

    More than half may, and half with the lowest: of two such sets one has a rank of the other. So
    may all who live, however few. Who is only silent may live on the other side of a cut.

    >>> suffices({0, 1}, set(), {0, 1, 2, 3}), suffices({2, 3}, set(), {0, 1, 2, 3})
    (True, False)
    >>> suffices({3}, {0, 1, 2}, {0, 1, 2, 3})
    True
    """
    if voters - yes <= ended:
        return True
    if 2 * len(yes & voters) == len(voters):
        return min(voters) in yes
    return 2 * len(yes & voters) > len(voters)


class Poll:
    """An attempt of `rank` to move the ledger of `voters` from `expected` to `desired`. Knows no
    sockets and no clock: `asks` are to be sent, answers to be told."""

    def __init__(self, rank: int, voters: Set[int], expected: int, desired: int) -> None:
        self._rank, self._voters, self._expected = rank, voters, expected
        self._ballot = desired // 2
        self.asks: list[tuple[int, Ask]] = []
        """To whom; the one who asks takes them out."""
        self.seen: int | None = None
        """At the end: where the ledger was, `expected` if it has moved."""
        self.decision: Ask | None = None
        """What all are to be told, if it brought a decision."""
        if decided(desired):
            self._begin(Ask(step=Step.CHOOSE, rank=rank, ballot=self._ballot, choice=self._ballot))
        else:
            self._begin(Ask(step=Step.PROMISE, rank=rank, ballot=self._ballot))

    @property
    def votes(self) -> frozenset[int]:
        """Who has said yes to the latest question."""
        return frozenset(self._votes)

    def hear(self, rank: int, answer: Answer) -> None:
        """An answer has come; one to an earlier question does nothing."""
        if self.seen is not None or answer.to != self._ask:
            return
        if not answer.yes:  # another has asked for more
            self.seen = undecided(answer.vote.promised)
            return
        self._votes[rank] = answer.vote
        if rank == self._rank:
            self.asks += [(other, self._ask) for other in sorted(self._voters - {rank})]

    def settle(self, ended: Set[int]) -> None:
        """Takes the next step if there are enough answers; `ended` have ended for certain."""
        if self.seen is not None or self._rank not in self._votes:
            return
        if suffices(self.votes, self._ask.ended, self._voters):
            self._take()
        elif suffices(self.votes, ended, self._voters):
            # Those votes must know it too, or take what the ended said for later than this.
            self._begin(replace(self._ask, ended=frozenset(ended)))

    def _take(self) -> None:
        ask = self._ask
        if ask.step is Step.CHOOSE:
            self.decision = replace(ask, step=Step.KNOW)
            self.seen = self._expected if ask.choice == self._ballot else undecided(ask.choice) + 1
            return
        latest = max(self._votes.values(), key=lambda vote: vote.ballot)
        if latest.choice:  # may be decided already, so nothing else can be
            self._begin(replace(ask, step=Step.CHOOSE, choice=latest.choice))
        else:
            self.seen = self._expected

    def _begin(self, ask: Ask) -> None:
        # Its own vote first: who asks all that live later on finds there what others were asked.
        self._ask = ask
        self._votes: dict[int, Vote] = {}
        self.asks.append((self._rank, ask))
