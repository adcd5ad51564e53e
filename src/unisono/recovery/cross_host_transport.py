"""Recovery transport for a failed group on several hosts.

Messages go directly between connection managers. The ledger of the agreement is not in memory that
all ranks can read. Instead, the votes of the old group's hosts hold it (`control/vote.py`), each in
the segment of the host's ranks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Set

from unisono import native
from unisono.bootstrap import GroupNetwork, JoinedGroup
from unisono.control import (
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
from unisono.errors import AbortedError
from unisono.recovery import agreement
from unisono.recovery.quorum import Poll, entry_of
from unisono.recovery.transport import RecoveryRequest, TooFewError, recovered_group_config
from unisono.transport import tag_of

_VOTE_S = 5.0
"""Time limit after the last reply. A connection manager replies at once, unless its process is
stopped. But if many ranks share a core, replies arrive one by one."""

_LOOK_S = 0.05

_TOO_FEW = (
    "rank {rank} cannot shrink: it reaches the hosts of only {count} of the {voters} ranks, "
    "{reached}. It needs a majority of {most}{half}. Ranks {silent} may have survived beyond a "
    "network failure, and shrink there. If you know that they have ended, call "
    "shrink(exclude={exclude}) on all ranks that are left"
)


class CrossHostTransport:
    """The transport. `network` belongs to the failed `group`."""

    def __init__(
        self, network: GroupNetwork, group: native.Group, request: RecoveryRequest
    ) -> None:
        self._connections, self._form = (
            network.network.connections(),
            network.network.form_recovered,
        )
        self._group = group
        self._rank, self._members = request.rank, network.members
        self._places = {member: rank for rank, member in enumerate(self._members)}
        self._others = [rank for rank in range(len(self._members)) if rank != self._rank]
        self._hosts = [frozenset(host) - request.exclude for host in network.hosts]
        self._voters = frozenset[int]().union(*self._hosts)
        here = next(host for host in network.hosts if self._rank in host)
        self._away = self._voters - set(here)
        self._texts: list[tuple[int, bytes]] = []
        self._answers: list[tuple[int, VoteReply]] = []
        self._unreached: set[int] = set()
        self._mute: set[int] = set()  # ranks that have left the group and have no vote
        self._quit: set[int] = set()
        self._gave_up = False
        # A rank that was given another `exclude` makes a different attempt.
        excluded = hashlib.sha256(repr(sorted(request.exclude)).encode()).digest()
        self._attempt = (tag_of(network.name), excluded)
        self._box = self._connections.open_box(
            self._attempt, [self._members[rank] for rank in self._others]
        )

    def close(self, *, finished: bool) -> None:
        """Ends the attempt; unless it `finished`, tells the others not to wait."""
        for_good = not self._gave_up
        self._connections.shut_box(self._attempt, finished=finished, for_good=for_good)

    # ---- messages

    def send(self, to: int, data: bytes) -> None:
        """Sends a message, if that rank is within reach."""
        self._connections.send(self._attempt, self._members[to], data)

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Returns messages that arrived, with their sources."""
        self._read(0 if self._texts else timeout_s)
        texts, self._texts = self._texts, []
        return texts

    def keep_up(self) -> frozenset[int]:
        """Returns ranks that have ended on this host, have left the group, have given up, or are
        out of reach."""
        self._read(0)
        left = {rank for rank in self._others if not self._group.present(rank)}
        return frozenset(left | self._quit | self._unreached)

    def _read(self, timeout_s: float) -> None:
        for news in self._box.take(timeout_s):
            match news:
                case RecoveryText(source=source, data=data) if source in self._places:
                    self._texts.append((self._places[source], data))
                case VoteArrived(source=source, answer=None) if source in self._places:
                    self._mute.add(self._places[source])
                case VoteArrived(source=source, answer=VoteReply() as answer) if (
                    source in self._places
                ):
                    self._answers.append((self._places[source], answer))
                case Unreachable(rank=member) if member in self._places:
                    self._unreached.add(self._places[member])
                case GaveUp(rank=member) if member in self._places:
                    self._quit.add(self._places[member])

    # ---- the ledger

    def advance(self, expected: int, desired: int) -> int:
        """Moves the ledger if it equals `expected`; returns its previous value. Raises
        `TooFewError` if too few hosts are within reach for a decision."""
        if expected == desired:
            return self._entry()
        if desired // 2 >= END_OF_BALLOTS:
            raise AbortedError(f"rank {self._rank}: the ranks do not agree on a new group")
        poll = Poll(self._hosts, expected, desired)
        asked: VoteRequest | None = None
        deadline = time.monotonic() + _VOTE_S
        while True:
            if poll.ask is not asked:
                asked = poll.ask
                self._ask(asked)
                poll.hear(self._rank, cast_in(self._group.exchange_successor, asked))
            elif poll.seen is not None:
                break
            elif agreement.decided(entry := self._entry()):
                return entry
            elif self._awaited(poll.reached) and time.monotonic() < deadline:
                if self._hear(poll):
                    deadline = time.monotonic() + _VOTE_S
            else:
                self._gave_up = True
                raise TooFewError(self._too_few(poll.reached))
        if poll.decision is not None:
            cast_in(self._group.exchange_successor, poll.decision)
            self._ask(poll.decision)
        return poll.seen

    def _hear(self, poll: Poll) -> bool:
        """Returns whether replies arrived."""
        self._read(_LOOK_S)
        answers, self._answers = self._answers, []
        for rank, answer in answers:
            poll.hear(rank, answer)
        return bool(answers)

    def _awaited(self, reached: Set[int]) -> Set[int]:
        """Returns ranks that may still reply for a host without a reply."""
        return self._away - reached - self._unreached - self._mute

    def _ask(self, ask: VoteRequest) -> None:
        for rank in sorted(self._away):
            self._connections.ask(self._attempt, self._members[rank], ask)

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
        """Forms the group of a ballot, as a world's groups are formed."""
        meeting = recovered_group_config(self, request, ballot, members)
        return self._form(meeting, [self._members[rank] for rank in members])
