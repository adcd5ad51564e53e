"""How one rank moves a ledger that is made of votes, and when those that it has suffice.

A ledger's word moves to a ballot's number when enough hosts promise to count nothing lower, and to
a decision when enough choose the group formed under it. Two such sets always have a host in common,
so a ballot finds what an earlier one may have decided, and then can only decide the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from unisono.control import Vote, VotePhase, VoteReply, VoteRequest
from unisono.recovery.agreement import decided, undecided


def suffices(yes: Set[int], voters: Set[int]) -> bool:
    """Whether the hosts of the ranks `yes` of all `voters` may decide.

    More than half of the ranks may, and half with the lowest: two such sets have a rank in common.
    Who is silent may live on the other side of a cut, and never counts as dead.

    >>> suffices({0, 1}, {0, 1, 2, 3}), suffices({2, 3}, {0, 1, 2, 3})
    (True, False)
    """
    count = 2 * len(yes & voters)
    return count > len(voters) or (count == len(voters) and min(voters) in yes)


def entry_of(vote: Vote) -> int:
    """The ledger's word, as far as a vote knows it."""
    return undecided(vote.choice) + 1 if vote.decided else undecided(vote.promised)


class Poll:
    """An attempt to move the ledger from `expected` to `desired`. `hosts` are the ranks of each
    host that count. A host that answers has all their votes: a rank that lives there answers for
    itself, for those that share the word with it, and for those that its kernel knows to be dead.

    Knows no sockets and no clock: `ask` is to be sent to all hosts whenever it changes."""

    def __init__(self, hosts: Iterable[Set[int]], expected: int, desired: int) -> None:
        self._hosts = [frozenset(host) for host in hosts if host]
        self._voters = frozenset[int]().union(*self._hosts)
        self._votes: dict[frozenset[int], Vote] = {}
        self._expected, self._ballot = expected, desired // 2
        if decided(desired):
            self.ask = VoteRequest(step=VotePhase.CHOOSE, ballot=self._ballot, choice=self._ballot)
        else:
            self.ask = VoteRequest(step=VotePhase.PROMISE, ballot=self._ballot)
        self.seen: int | None = None
        """At the end: where the ledger was, `expected` if it has moved."""
        self.decision: VoteRequest | None = None
        """What all are to be told, if it brought a decision."""

    @property
    def reached(self) -> frozenset[int]:
        """The ranks of the hosts that have said yes to the latest question."""
        return frozenset[int]().union(*self._votes)

    def hear(self, rank: int, answer: VoteReply) -> None:
        """A rank has answered for its host; an answer to an earlier question does nothing."""
        if self.seen is not None or answer.to != self.ask:
            return
        if not answer.yes:  # another has asked for more
            self.seen = entry_of(answer.vote)
            return
        self._votes.update({host: answer.vote for host in self._hosts if rank in host})
        if suffices(self.reached, self._voters):
            self._take()

    def _take(self) -> None:
        ask = self.ask
        if ask.step is VotePhase.CHOOSE:
            self.decision = VoteRequest(step=VotePhase.KNOW, ballot=ask.ballot, choice=ask.choice)
            self.seen = self._expected if ask.choice == self._ballot else undecided(ask.choice) + 1
            return
        latest = max(self._votes.values(), key=lambda vote: vote.ballot)
        if latest.choice:  # may be decided already, so nothing else can be
            self.ask = VoteRequest(step=VotePhase.CHOOSE, ballot=ask.ballot, choice=latest.choice)
            self._votes = {}
        else:
            self.seen = self._expected
