"""Changes the recovery's ledger, the word that records the decision, by votes of the hosts.
Determines how many votes suffice.

The ledger's word becomes a ballot's number when enough hosts promise to refuse lower ballots. The
word becomes a decision when enough hosts choose the group formed under a ballot. Two such sets of
hosts always share a host. So a ballot finds any earlier decision, and can then only repeat it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from unisono.rank_connections import Vote, VotePhase, VoteReply, VoteRequest
from unisono.recovery.membership_agreement import decided, undecided


def suffices(yes: Set[int], voters: Set[int]) -> bool:
    """Returns True if the ranks `yes` are enough of all `voters` for a decision.

    More than half of the ranks may decide, or exactly half including the lowest rank: two such sets
    share a rank. A silent rank may be alive behind a network failure, and never counts as dead.

    >>> suffices({0, 1}, {0, 1, 2, 3}), suffices({2, 3}, {0, 1, 2, 3})
    (True, False)
    """
    count = 2 * len(yes & voters)
    return count > len(voters) or (count == len(voters) and min(voters) in yes)


def entry_of(vote: Vote) -> int:
    """Returns the ledger's word as one host's vote shows it. It may be out of date."""
    return undecided(vote.choice) + 1 if vote.decided else undecided(vote.promised)


class Poll:
    """An attempt to change the ledger from `expected` to `desired`.

    `hosts` are the voting ranks of each host. A host's reply counts for all its ranks: one live
    rank replies for itself, for ranks that share the word, and for ranks that its kernel knows to
    be dead.

    The class uses no socket and no clock. Whenever `request` changes, send it to all hosts.
    """

    def __init__(self, hosts: Iterable[Set[int]], expected: int, desired: int) -> None:
        self._hosts = [frozenset(host) for host in hosts if host]
        self._voters = frozenset[int]().union(*self._hosts)
        self._votes: dict[frozenset[int], Vote] = {}
        self._expected, self._ballot = expected, desired // 2
        if decided(desired):
            self.request = VoteRequest(
                phase=VotePhase.CHOOSE, ballot=self._ballot, choice=self._ballot
            )
        else:
            self.request = VoteRequest(phase=VotePhase.PROMISE, ballot=self._ballot)
        self.seen: int | None = None
        """The ledger's previous value after the attempt; equal to `expected` if the attempt changed
        the ledger. None before the end.
        """
        self.decision: VoteRequest | None = None
        """Request that tells all hosts the decision, if the attempt led to a decision."""

    @property
    def reached(self) -> frozenset[int]:
        """Ranks of the hosts that have agreed to the latest request."""
        return frozenset[int]().union(*self._votes)

    def handle(self, rank: int, reply: VoteReply) -> None:
        """Handles a rank's reply for its host; ignores a reply to an earlier request."""
        if self.seen is not None or reply.to != self.request:
            return
        if not reply.yes:  # another rank has started a ballot with a higher number
            self.seen = entry_of(reply.vote)
            return
        self._votes.update({host: reply.vote for host in self._hosts if rank in host})
        if suffices(self.reached, self._voters):
            self._take()

    def _take(self) -> None:
        request = self.request
        if request.phase is VotePhase.CHOOSE:
            self.decision = VoteRequest(
                phase=VotePhase.DECIDED, ballot=request.ballot, choice=request.choice
            )
            self.seen = (
                self._expected if request.choice == self._ballot else undecided(request.choice) + 1
            )
            return
        latest = max(self._votes.values(), key=lambda vote: vote.ballot)
        if latest.choice:  # this choice may already be decided, so propose no other
            self.request = VoteRequest(
                phase=VotePhase.CHOOSE, ballot=request.ballot, choice=latest.choice
            )
            self._votes = {}
        else:
            self.seen = self._expected
