"""Recovery transport for a failed group on several hosts.

Messages go directly between connection managers. The ledger, the word that records the agreement's
decision, cannot be in memory that all ranks read. Instead, the votes of the old group's hosts hold
the ledger (`control/paxos_acceptor.py`). Each vote is in the segment of its host's ranks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Set

from unisono import native
from unisono.bootstrap import GroupNetwork, JoinedGroup
from unisono.errors import AbortedError
from unisono.rank_connections import (
    END_OF_BALLOTS,
    GaveUp,
    RecoveryText,
    Unreachable,
    Vote,
    VoteArrived,
    VoteReply,
    VoteRequest,
    cast_in,
)
from unisono.recovery import membership_agreement
from unisono.recovery.quorum import Poll, entry_of
from unisono.recovery.transport import RecoveryRequest, TooFewError, recovered_group_config
from unisono.transport import tag_of

_VOTE_S = 5.0
"""Seconds to wait for the next reply. A connection manager replies at once, unless its process is
stopped. But if many ranks share a core, replies arrive one by one."""

_POLL_S = 0.05

_TOO_FEW = (
    "rank {rank} cannot shrink: it reaches the hosts of only {count} of the {voters} ranks, "
    "{reached}. It needs a majority of {most}{half}. Ranks {silent} may have survived beyond a "
    "network failure, and shrink there. If you know that they have ended, call "
    "shrink(exclude={exclude}) on all ranks that are left"
)


class CrossHostTransport:
    """A `RecoveryTransport` across hosts. `network` is the network of the failed `group`."""

    def __init__(
        self, network: GroupNetwork, group: native.Group, request: RecoveryRequest
    ) -> None:
        self._connections, self._form = (
            network.network.connections(),
            network.network.form_recovered,
        )
        self._group = group
        self._rank, self._members = request.rank, network.members
        self._rank_of = {member: rank for rank, member in enumerate(self._members)}
        self._others = [rank for rank in range(len(self._members)) if rank != self._rank]
        self._hosts = [frozenset(host) - request.exclude for host in network.hosts]
        self._voters = frozenset[int]().union(*self._hosts)
        here = next(host for host in network.hosts if self._rank in host)
        self._remote = self._voters - set(here)
        self._texts: list[tuple[int, bytes]] = []
        self._replies: list[tuple[int, VoteReply]] = []
        self._unreachable: set[int] = set()
        self._voteless: set[int] = set()  # ranks that have left the group and have no vote
        self._gave_up_ranks: set[int] = set()
        self._gave_up = False
        # Ranks with different values of `exclude` take part in different attempts.
        excluded = hashlib.sha256(repr(sorted(request.exclude)).encode()).digest()
        self._attempt = (tag_of(network.name), excluded)
        self._inbox = self._connections.open_inbox(
            self._attempt, [self._members[rank] for rank in self._others]
        )

    def close(self, *, finished: bool) -> None:
        """Ends the attempt. Unless the attempt `finished`, tells the other ranks not to wait for
        this rank.
        """
        for_good = not self._gave_up
        self._connections.close_inbox(self._attempt, finished=finished, for_good=for_good)

    # ---- messages

    def send(self, to: int, data: bytes) -> None:
        """Sends a message to rank `to`, if that rank is reachable."""
        self._connections.send(self._attempt, self._members[to], data)

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Returns the messages that have arrived, with their sources."""
        self._read(0 if self._texts else timeout_s)
        texts, self._texts = self._texts, []
        return texts

    def progress(self) -> frozenset[int]:
        """Returns ranks of this host that have ended, and ranks of any host that have left the
        group, have given up, or are unreachable.
        """
        self._read(0)
        left = {rank for rank in self._others if not self._group.present(rank)}
        return frozenset(left | self._gave_up_ranks | self._unreachable)

    def _read(self, timeout_s: float) -> None:
        for event in self._inbox.take(timeout_s):
            match event:
                case RecoveryText(source=source, data=data) if source in self._rank_of:
                    self._texts.append((self._rank_of[source], data))
                case VoteArrived(source=source, reply=None) if source in self._rank_of:
                    self._voteless.add(self._rank_of[source])
                case VoteArrived(source=source, reply=VoteReply() as reply) if (
                    source in self._rank_of
                ):
                    self._replies.append((self._rank_of[source], reply))
                case Unreachable(rank=member) if member in self._rank_of:
                    self._unreachable.add(self._rank_of[member])
                case GaveUp(rank=member) if member in self._rank_of:
                    self._gave_up_ranks.add(self._rank_of[member])

    # ---- the ledger

    def advance(self, expected: int, desired: int) -> int:
        """Sets the ledger, the word that records the decision, to `desired` if it equals
        `expected`; returns the previous value. Raises `TooFewError` if too few hosts are reachable
        for a decision."""
        if expected == desired:
            return self._entry()
        if desired // 2 >= END_OF_BALLOTS:
            raise AbortedError(f"rank {self._rank}: the ranks do not agree on a new group")
        poll = Poll(self._hosts, expected, desired)
        requested: VoteRequest | None = None
        deadline = time.monotonic() + _VOTE_S
        while True:
            if poll.request is not requested:
                requested = poll.request
                self._request_votes(requested)
                poll.handle(self._rank, cast_in(self._group.exchange_successor, requested))
            elif poll.seen is not None:
                break
            elif membership_agreement.decided(entry := self._entry()):
                return entry
            elif self._awaited(poll.reached) and time.monotonic() < deadline:
                if self._take_replies(poll):
                    deadline = time.monotonic() + _VOTE_S
            else:
                self._gave_up = True
                raise TooFewError(self._too_few(poll.reached))
        if poll.decision is not None:
            cast_in(self._group.exchange_successor, poll.decision)
            self._request_votes(poll.decision)
        return poll.seen

    def _take_replies(self, poll: Poll) -> bool:
        """Passes the vote replies that have arrived to `poll`. Returns True if there were any."""
        self._read(_POLL_S)
        replies, self._replies = self._replies, []
        for rank, reply in replies:
            poll.handle(rank, reply)
        return bool(replies)

    def _awaited(self, reached: Set[int]) -> Set[int]:
        """Returns ranks that may still reply, for hosts that have not replied."""
        return self._remote - reached - self._unreachable - self._voteless

    def _request_votes(self, request: VoteRequest) -> None:
        for rank in sorted(self._remote):
            self._connections.request_vote(self._attempt, self._members[rank], request)

    def _entry(self) -> int:
        return entry_of(Vote.of(self._group.exchange_successor(0, 0)))

    def _too_few(self, reached: Set[int]) -> str:
        voters, silent = sorted(self._voters), sorted(self._voters - reached)
        half = f", or {len(voters) // 2} with the lowest, rank {voters[0]}"
        return _TOO_FEW.format(
            rank=self._rank,
            count=len(reached),
            reached=sorted(reached),
            voters=len(voters),
            most=len(voters) // 2 + 1,
            half="" if len(voters) % 2 else half,
            silent=silent,
            exclude=sorted({*range(len(self._members))} - reached),
        )

    # ---- the new group

    def form(self, request: RecoveryRequest, ballot: int, members: tuple[int, ...]) -> JoinedGroup:
        """Forms the group of a ballot (a numbered attempt) in the same way as other groups of the
        world.
        """
        group_config = recovered_group_config(self, request, ballot, members)
        return self._form(group_config, [self._members[rank] for rank in members])
