"""All groups that a rank has entered, and early messages for groups not entered yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from unisono.native import Group
from unisono.rank_connections.control_group import ControlGroup
from unisono.rank_connections.control_messages import ControlMessage, MessageKind
from unisono.rank_connections.group_connections import GroupConnections
from unisono.rank_connections.group_endpoint import GroupEndpoint
from unisono.rank_connections.paxos_acceptor import Vote, VoteReply, VoteRequest
from unisono.transport import Connection, Introduction

# maximum of one rank's connections that wait until this rank enters their groups
_MOST_PARKED = 256
_MOST_EARLY = 4096  # maximum of messages that wait until this rank enters their groups
_MOST_DEPARTED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Departed:
    """A group that this rank has left, with the host's vote at that time."""

    vote: Vote
    control_group: ControlGroup


class EnteredGroups:
    """The groups that this rank has entered, by tag. The loop's thread calls all methods. `refuse`
    closes a connection and logs the reason."""

    def __init__(self, refuse: Callable[[Connection, str], None]) -> None:
        self._refuse = refuse
        self._entered: dict[bytes, GroupConnections] = {}
        self._parked: list[tuple[Connection, Introduction]] = []
        self._early: deque[ControlMessage] = deque(maxlen=_MOST_EARLY)
        self._departed: dict[bytes, _Departed] = {}

    def enter(
        self,
        tag: bytes,
        members: Sequence[int],
        me: int,
        group: GroupEndpoint,
        control_group: ControlGroup,
    ) -> None:
        """Enters a group of some ranks of a control group. Handles connections and messages that
        arrived early."""
        self._departed.pop(tag, None)
        entered = self._entered[tag] = GroupConnections(control_group, tag, members, me, group)
        if control_group.has_lost_server:
            entered.server_lost()
        for sock, introduction in self._unpark(lambda introduction: introduction.tag == tag):
            self._take_connection(entered, sock, introduction)
        early = [message for message in self._early if message.tag == tag]
        for message in early:
            self._early.remove(message)
            entered.handle(message)
        for rank, text in control_group.lost.items():
            entered.lost(rank, text)

    def reach(self, tag: bytes, peers: Iterable[int], kind: int) -> None:
        """Connects to peers of a group. Does nothing if this rank has left the group."""
        if tag in self._entered:
            self._entered[tag].reach(peers, kind)

    def leave(self, tag: bytes) -> None:
        """Leaves a group, if this rank has entered it."""
        entered = self._entered.pop(tag, None)
        if entered is not None:
            self._departed[tag] = _Departed(
                vote=entered.vote(), control_group=entered.control_group
            )
            entered.leave()
            if len(self._departed) > _MOST_DEPARTED:
                del self._departed[next(iter(self._departed))]

    def cast(self, tag: bytes, request: VoteRequest) -> VoteReply | None:
        """Applies a vote request to this host's vote and returns the reply; None if this rank is
        not in the group.
        """
        return self._entered[tag].cast(request) if tag in self._entered else None

    def vote(self, tag: bytes) -> Vote | None:
        """Returns this host's vote on the group that replaces a failed group. If this rank has left
        the group, returns the vote that the host had then.
        """
        if tag in self._entered:
            return self._entered[tag].vote()
        return self._departed[tag].vote if tag in self._departed else None

    def leave_all(self) -> None:
        """Leaves all groups, and closes connections that wait for groups not entered yet."""
        for tag in list(self._entered):
            self.leave(tag)
        for sock, _ in self._unpark(lambda _: True):
            sock.close()

    def take(self, sock: Connection, introduction: Introduction) -> None:
        """Passes an authenticated connection to its group. Keeps the connection if this rank has
        not entered the group yet.
        """
        if introduction.tag in self._entered:
            self._take_connection(self._entered[introduction.tag], sock, introduction)
        elif introduction.tag in self._departed:
            Group.say_left(sock.detach(), sock.tls)
        elif sum(other.rank == introduction.rank for _, other in self._parked) >= _MOST_PARKED:
            self._refuse(
                sock, f"rank {introduction.rank} dialed for too many groups not entered yet"
            )
        else:
            self._parked.append((sock, introduction))

    def abandon(self) -> None:
        """Closes a forked child's copies of all connections of groups."""
        for entered in self._entered.values():
            entered.abandon()
        for sock, _ in self._parked:
            sock.close()

    def handle(
        self,
        message: ControlMessage,
        control_group: ControlGroup,
        send: Callable[[ControlMessage], None] | None = None,
    ) -> None:
        """Handles a message of another rank, sent through a control group's server or directly.

        `send` sends the answer to a direct message. Raises `ValueError` for a malformed message.
        """
        if message.kind is MessageKind.LOST:
            text = message.body.decode(errors="replace")
            control_group.lost.setdefault(message.origin, text)
            for entered in list(self._entered.values()):
                if entered.control_group is control_group:
                    entered.lost(message.origin, text)
        elif message.tag in self._entered:
            self._entered[message.tag].handle(message)
        elif message.kind is MessageKind.LAST_CALL_QUERY:
            # This rank has not entered the group, or has left it, so it has no call to report. The
            # empty answer shows that this rank is alive.
            departed = self._departed.get(message.tag)
            if departed is not None:
                control_group, send = departed.control_group, None
            send = send or control_group.world.send
            rank, to = control_group.world.config.rank, (message.origin,)
            answer = ControlMessage(
                kind=MessageKind.LAST_CALLS, origin=rank, tag=message.tag, to=to
            )
            send(answer)
            if control_group.has_lost_server and departed is not None:
                send(replace(answer, kind=MessageKind.LEFT))
        elif (
            message.kind in (MessageKind.LEFT, MessageKind.FAILED)
            and message.tag not in self._departed
        ):
            self._early.append(message)

    def server_lost(self, control_group: ControlGroup) -> None:
        """Handles the departure or loss of a control group's server."""
        for entered in list(self._entered.values()):
            if entered.control_group is control_group:
                entered.server_lost()

    def unreachable(self, rank: int, silent: str) -> None:
        """Handles a rank that direct messages cannot reach. `silent` is the error text if its host
        is silent, else empty."""
        for entered in list(self._entered.values()):
            entered.unreachable(rank, silent)

    def accept_failed(self, why: str) -> None:
        """Handles an acceptor that has been unable to accept connections for long."""
        for entered in list(self._entered.values()):
            entered.accept_failed(why)

    def _take_connection(
        self, entered: GroupConnections, sock: Connection, introduction: Introduction
    ) -> None:
        why_not = entered.take(sock, introduction)
        if why_not:
            self._refuse(sock, why_not)

    def _unpark(
        self, wanted: Callable[[Introduction], bool]
    ) -> list[tuple[Connection, Introduction]]:
        found = [parked for parked in self._parked if wanted(parked[1])]
        self._parked = [parked for parked in self._parked if not wanted(parked[1])]
        return found
