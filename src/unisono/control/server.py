"""Control server and client: every rank has a channel to the server on the first rank.

So n ranks need n - 1 connections to learn of each other's failures. The server detects the end of
any connection and can tell all ranks.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from unisono.control.channel import ControlChannel
from unisono.control.last_call_query import LastCallQueries
from unisono.control.messages import (
    ControlMessage,
    MessageKind,
    read_failed,
    read_looked,
    read_welcome,
    welcome_body,
)
from unisono.transport import EventLoop, Introduction

Deliver = Callable[[ControlMessage], None]


class ControlEndpoint(ABC):
    """This rank's end: client or server. The loop's thread calls all methods."""

    @abstractmethod
    def tell(self, message: ControlMessage) -> bool:
        """Sends a message of this rank to the reachable ranks of `message.to`. Returns False if the
        server is gone."""

    @abstractmethod
    def bye(self) -> None:
        """Tells the other side that this rank leaves in good order."""

    @abstractmethod
    def ended(self) -> bool:
        """Returns whether all connections are closed."""

    @abstractmethod
    def close(self) -> None:
        """Closes all connections at once."""


def lost(rank: int, host: str, pid: int, why: str) -> ControlMessage:
    """Makes the message that a rank is lost."""
    process = f", pid {pid}" if pid else ""
    text = f"rank {rank} (host {host}{process}) {why}"
    return ControlMessage(say=MessageKind.GONE, origin=rank, body=text.encode())


class ControlServer(ControlEndpoint):
    """The control server, on `rank`: a channel to each other rank of `hosts`, which maps ranks to
    host names.

    The server sends `word` to each rank that connects.
    """

    def __init__(
        self,
        loop: EventLoop,
        rank: int,
        hosts: Mapping[int, str],
        peer_timeout_s: float,
        word: bytes,
        deliver: Deliver,
    ) -> None:
        self._loop, self._rank, self._peer_timeout_s = loop, rank, peer_timeout_s
        self._hosts, self._word, self._deliver = hosts, word, deliver
        self._lines: dict[int, ControlChannel] = {}
        self._seen: set[int] = set()
        self._looks = LastCallQueries(loop, rank, self._tell_one)
        self._leaving = False

    @property
    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return sorted(self._hosts.keys() - {self._rank} - self._seen)

    def awaits(self, rank: int) -> bool:
        """Returns whether a rank is expected and has never connected."""
        return rank in self._hosts and rank != self._rank and rank not in self._seen

    def take(self, sock: socket.socket, introduction: Introduction) -> None:
        """Takes a rank's connection."""
        rank, pid = introduction.rank, introduction.pid
        self._seen.add(rank)
        self._lines[rank] = ControlChannel(
            self._loop,
            sock,
            self._peer_timeout_s,
            heard=lambda message: self._heard(rank, message),
            ended=lambda why: self._ended(rank, pid, why),
        )
        body = welcome_body(os.getpid(), self._word)
        welcome = ControlMessage(say=MessageKind.WELCOME, origin=self._rank, body=body)
        self._lines[rank].say(welcome)

    def tell(self, message: ControlMessage) -> bool:
        self._heard(self._rank, message)
        return True

    def bye(self) -> None:
        self._leaving = True
        for line in list(self._lines.values()):
            line.say(ControlMessage(say=MessageKind.BYE, origin=self._rank))

    def ended(self) -> bool:
        return not self._lines

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _heard(self, rank: int, message: ControlMessage) -> None:
        """Forwards a message. Raises `ValueError` for a malformed message."""
        if message.origin != rank or any(to not in self._hosts for to in message.to):
            raise ValueError(f"a message of rank {message.origin} from rank {rank}")
        match message.say:
            case MessageKind.LEFT | MessageKind.FAILED:
                if message.say is MessageKind.FAILED:
                    read_failed(message.body)  # raises for a malformed body
                onward = ControlMessage(
                    say=message.say, origin=rank, tag=message.tag, body=message.body
                )
                for to in message.to:
                    if to != rank:
                        self._tell_one(to, onward)
            case MessageKind.LOOK:
                self._looks.ask(message)
            case MessageKind.LOOKED:
                self._looks.answer(message, read_looked(message.body))
            case MessageKind.BYE:
                self._lines.pop(rank).close()
            case _:
                raise ValueError(f"a message of kind {message.say} from rank {rank}")

    def _tell_one(self, rank: int, message: ControlMessage) -> None:
        if rank == self._rank:
            self._deliver(message)
        elif rank in self._lines:
            line = self._lines[rank]
            (line.ask if message.say is MessageKind.LOOK else line.say)(message)

    def _ended(self, rank: int, pid: int, why: str) -> None:
        line = self._lines.pop(rank, None)
        if why and not self._leaving:
            news = lost(rank, self._hosts[rank], pid, why)
            if line is not None:  # else the rank would report this rank as lost
                line.say_last(news)
            for line in list(self._lines.values()):
                line.say(news)
            self._deliver(news)


class ControlClient(ControlEndpoint):
    """Control client of every other rank: the channel to the server."""

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        peer_timeout_s: float,
        *,
        rank: int,
        hub: int,
        hub_host: str,
        deliver: Deliver,
        welcome: Callable[[bytes], None],
        orphaned: Callable[[], None],
    ) -> None:
        """`orphaned` is called when the server has left or is lost."""
        self._rank, self._hub, self._hub_host = rank, hub, hub_host
        self._deliver, self._welcome, self._orphaned = deliver, welcome, orphaned
        self._pid = 0
        self._leaving = False
        self._line: ControlChannel | None = ControlChannel(
            loop, sock, peer_timeout_s, heard=self._heard, ended=self._ended
        )

    def tell(self, message: ControlMessage) -> bool:
        if self._line is None:
            return False
        (self._line.ask if message.say is MessageKind.LOOK else self._line.say)(message)
        return True

    def bye(self) -> None:
        self._leaving = True
        if self._line is not None:
            self._line.say(ControlMessage(say=MessageKind.BYE, origin=self._rank))

    def ended(self) -> bool:
        return self._line is None

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _heard(self, message: ControlMessage) -> None:
        match message.say:
            case MessageKind.WELCOME:
                self._pid, word = read_welcome(message.body)
                self._welcome(word)
            case MessageKind.BYE:
                self.close()
                self._end()
            case _:
                self._deliver(message)

    def _ended(self, why: str) -> None:
        self._line = None
        if why and not self._leaving:
            self._deliver(lost(self._hub, self._hub_host, self._pid, why))
        self._end()

    def _end(self) -> None:
        if not self._leaving:
            self._orphaned()
