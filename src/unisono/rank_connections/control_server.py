"""Control server and client: every rank has a channel to the server on the first rank.

So n ranks need only n - 1 connections to learn of each other's failures. The server detects the end
of any connection and tells all ranks.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from unisono.rank_connections.control_messages import (
    ControlMessage,
    MessageKind,
    pack_welcome,
    unpack_failure,
    unpack_last_calls,
    unpack_welcome,
)
from unisono.rank_connections.last_call_query import LastCallQueries
from unisono.rank_connections.watched_channel import WatchedChannel
from unisono.transport import EventLoop, Introduction

Deliver = Callable[[ControlMessage], None]


class ControlEndpoint(ABC):
    """This rank's end of the control channels: a client or the server. The loop's thread calls all
    methods.
    """

    @abstractmethod
    def send(self, message: ControlMessage) -> bool:
        """Sends a message of this rank to the reachable ranks of `message.to`. Returns False if the
        server is lost or has left."""

    @abstractmethod
    def leave(self) -> None:
        """Tells the other end that this rank leaves without a failure."""

    @abstractmethod
    def ended(self) -> bool:
        """Returns True if all connections are closed."""

    @abstractmethod
    def close(self) -> None:
        """Closes all connections at once."""


def lost_message(rank: int, host: str, pid: int, why: str) -> ControlMessage:
    """Returns the message that reports a lost rank."""
    process = f", pid {pid}" if pid else ""
    text = f"rank {rank} (host {host}{process}) {why}"
    return ControlMessage(kind=MessageKind.LOST, origin=rank, body=text.encode())


class ControlServer(ControlEndpoint):
    """The control server, on `rank`: a channel to each other rank of `hosts`, which maps ranks to
    host names.

    The server sends `rank0_data` to each rank that connects.
    """

    def __init__(
        self,
        loop: EventLoop,
        rank: int,
        hosts: Mapping[int, str],
        peer_timeout_s: float,
        rank0_data: bytes,
        deliver: Deliver,
    ) -> None:
        self._loop, self._rank, self._peer_timeout_s = loop, rank, peer_timeout_s
        self._hosts, self._rank0_data, self._deliver = hosts, rank0_data, deliver
        self._channels: dict[int, WatchedChannel] = {}
        self._seen: set[int] = set()
        self._last_calls = LastCallQueries(loop, rank, self._send_to)
        self._leaving = False

    @property
    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return sorted(self._hosts.keys() - {self._rank} - self._seen)

    def awaits(self, rank: int) -> bool:
        """Returns True if a rank is expected and has never connected."""
        return rank in self._hosts and rank != self._rank and rank not in self._seen

    def take(self, sock: socket.socket, introduction: Introduction) -> None:
        """Accepts a rank's connection as its control channel, and sends the welcome message."""
        rank, pid = introduction.rank, introduction.pid
        self._seen.add(rank)
        self._channels[rank] = WatchedChannel(
            self._loop,
            sock,
            self._peer_timeout_s,
            received=lambda message: self._received(rank, message),
            ended=lambda why: self._ended(rank, pid, why),
        )
        body = pack_welcome(os.getpid(), self._rank0_data)
        welcome = ControlMessage(kind=MessageKind.WELCOME, origin=self._rank, body=body)
        self._channels[rank].send(welcome)

    def send(self, message: ControlMessage) -> bool:
        self._received(self._rank, message)
        return True

    def leave(self) -> None:
        self._leaving = True
        for channel in list(self._channels.values()):
            channel.send(ControlMessage(kind=MessageKind.BYE, origin=self._rank))

    def ended(self) -> bool:
        return not self._channels

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _received(self, rank: int, message: ControlMessage) -> None:
        """Forwards a message. Raises `ValueError` for a malformed message."""
        if message.origin != rank or any(to not in self._hosts for to in message.to):
            raise ValueError(f"a message of rank {message.origin} from rank {rank}")
        match message.kind:
            case MessageKind.LEFT | MessageKind.FAILED:
                if message.kind is MessageKind.FAILED:
                    unpack_failure(message.body)  # raises for a malformed body
                forwarded = ControlMessage(
                    kind=message.kind, origin=rank, tag=message.tag, body=message.body
                )
                for to in message.to:
                    if to != rank:
                        self._send_to(to, forwarded)
            case MessageKind.LAST_CALL_QUERY:
                self._last_calls.query(message)
            case MessageKind.LAST_CALLS:
                self._last_calls.answer(message, unpack_last_calls(message.body))
            case MessageKind.BYE:
                self._channels.pop(rank).close()
            case _:
                raise ValueError(f"a message of kind {message.kind} from rank {rank}")

    def _send_to(self, rank: int, message: ControlMessage) -> None:
        if rank == self._rank:
            self._deliver(message)
        elif rank in self._channels:
            channel = self._channels[rank]
            (channel.send_query if message.kind is MessageKind.LAST_CALL_QUERY else channel.send)(
                message
            )

    def _ended(self, rank: int, pid: int, why: str) -> None:
        channel = self._channels.pop(rank, None)
        if why and not self._leaving:
            notice = lost_message(rank, self._hosts[rank], pid, why)
            if channel is not None:  # tell the rank, too: else it reports this rank as lost
                channel.send_last(notice)
            for channel in list(self._channels.values()):
                channel.send(notice)
            self._deliver(notice)


class ControlClient(ControlEndpoint):
    """The control client, on every other rank: the channel to the server."""

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        peer_timeout_s: float,
        *,
        rank: int,
        server_rank: int,
        server_host: str,
        deliver: Deliver,
        welcome: Callable[[bytes], None],
        server_lost: Callable[[], None],
    ) -> None:
        """`server_lost` is called when the server has left or is lost."""
        self._rank, self._server_rank, self._server_host = rank, server_rank, server_host
        self._deliver, self._welcome, self._server_lost = deliver, welcome, server_lost
        self._pid = 0
        self._leaving = False
        self._channel: WatchedChannel | None = WatchedChannel(
            loop, sock, peer_timeout_s, received=self._received, ended=self._ended
        )

    def send(self, message: ControlMessage) -> bool:
        if self._channel is None:
            return False
        (
            self._channel.send_query
            if message.kind is MessageKind.LAST_CALL_QUERY
            else self._channel.send
        )(message)
        return True

    def leave(self) -> None:
        self._leaving = True
        if self._channel is not None:
            self._channel.send(ControlMessage(kind=MessageKind.BYE, origin=self._rank))

    def ended(self) -> bool:
        return self._channel is None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _received(self, message: ControlMessage) -> None:
        match message.kind:
            case MessageKind.WELCOME:
                self._pid, rank0_data = unpack_welcome(message.body)
                self._welcome(rank0_data)
            case MessageKind.BYE:
                self.close()
                self._end()
            case _:
                self._deliver(message)

    def _ended(self, why: str) -> None:
        self._channel = None
        if why and not self._leaving:
            self._deliver(lost_message(self._server_rank, self._server_host, self._pid, why))
        self._end()

    def _end(self) -> None:
        if not self._leaving:
            self._server_lost()
