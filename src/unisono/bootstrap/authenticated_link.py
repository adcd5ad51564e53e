"""Authenticated connections between two programs, for messages that are pickled objects.

A program listens, and others dial. Both ends prove that they know a key before any object passes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from unisono.bootstrap.tcp_address import keep_alive
from unisono.config import Settings
from unisono.errors import RendezvousError
from unisono.transport import available_interfaces, choose_interfaces, listen

Address = tuple[str, int]
_DIAL_S = 5.0


class LinkListener:
    """Accepts connections, each in a thread, so that a silent client delays no other.

    `arrived(connection)` is called in that thread for each client that knows the key.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], key: bytes, arrived: Callable[[Connection], None]
    ) -> None:
        self._sockets = sockets
        self._key = key
        self._arrived = arrived
        for each in sockets:
            each.setblocking(True)
            threading.Thread(target=self._accept, args=(each,), daemon=True).start()

    @property
    def addresses(self) -> list[Address]:
        """Addresses at which clients are accepted."""
        return [each.getsockname()[:2] for each in self._sockets]

    def close(self) -> None:
        """Stops accepting, which ends the threads."""
        for each in self._sockets:
            with contextlib.suppress(OSError):  # nobody is connected to a listening socket
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._welcome, args=(client,), daemon=True).start()

    def _welcome(self, client: socket.socket) -> None:
        connection = _connection(client)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
        except Exception:  # another program, whose bytes can mean anything
            connection.close()
        else:
            self._arrived(connection)


def listen_for_links(
    settings: Settings, key: bytes, arrived: Callable[[Connection], None]
) -> LinkListener:
    """Listens on the interfaces of this host that the settings choose."""
    interfaces = choose_interfaces(settings.interface, available_interfaces(settings.ip_version))
    sockets = listen([each.address for each in interfaces], settings.ports)
    return LinkListener(sockets, key, arrived)


def dial_link(addresses: Sequence[Address], key: bytes, *, other_end: str) -> Connection:
    """Connects to the first address that answers. Raises `RendezvousError` if none does; its text
    calls the listener `other_end`.
    """
    problems = []
    for address in addresses:
        try:
            connection = _connection(socket.create_connection(address, _DIAL_S))
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            return connection
        except (OSError, EOFError, AuthenticationError) as error:
            problems.append(f"{address[0]} port {address[1]}: {error or type(error).__name__}")
    raise RendezvousError(
        f"this process cannot reach {other_end} (it may have ended, or set UNISONO_INTERFACE there "
        "to an interface that this host reaches): " + "; ".join(problems)
    )


def own_address(connection: Connection) -> str:
    """Returns this host's address, as the other end of the connection sees it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        return str(same.getsockname()[0])


def _connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    keep_alive(connected)
    return Connection(connected.detach())
