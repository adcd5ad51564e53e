"""The address of a TCP rendezvous, `tcp://host:port`, and its resolution on this host."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from unisono.errors import RendezvousError
from unisono.transport import available_interfaces

PATIENCE_S = 10.0
"""Seconds for which an unknown host name or a port in use is tried again."""
_PAUSE_S = 0.05
_SET_IT = "set UNISONO_RENDEZVOUS=tcp://ADDRESS:PORT with an address of rank 0's host"

Address = tuple[int, tuple[str, int] | tuple[str, int, int, int]]
"""Address family, and the address that `socket.connect` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpAddress:
    """A parsed rendezvous. `text` is the original text. After the port it may contain a name, so
    that jobs with the same port have different texts.
    """

    host: str
    port: int
    text: str

    def digest(self) -> bytes:
        """Returns a hash of `text`. Rank 0 uses the hash to detect ranks of another job, which may
        use the same port by mistake or one job after another.
        """
        return hashlib.sha256(self.text.encode()).digest()[:16]

    def warning(self) -> str:
        """Returns a hint for the error of ranks that reached the timeout, or an empty text."""
        if not _only_here(self.host):
            return ""
        return f"; {self.host} is a different machine on each host: with several hosts, {_SET_IT}"


def parse(text: str) -> TcpAddress:
    """Parses `tcp://host:port`; an IPv6 address is in brackets.

    Raises `ValueError` for any other text.

    >>> parse("tcp://[fd00::1]:29400/job").host
    'fd00::1'
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise ValueError(f"expected a rendezvous tcp://HOST:PORT with a port from 1, not {text!r}")
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = False
    if wildcard:
        raise ValueError(f"{text!r} is a wildcard: the others need the address of rank 0's host")
    return TcpAddress(host=host, port=port, text=text)


def resolve(address: TcpAddress) -> list[Address]:
    """Resolves the host name. Excludes addresses that other hosts cannot reach.

    Raises `RendezvousError` if no address is left, `OSError` if the name is unknown.
    """
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    addresses: list[Address] = [(int(family), where) for family, _, _, _, where in found]  # type: ignore[misc]
    if _is_address(address.host) or _only_here(address.host):
        return addresses
    outside = [one for one in addresses if not ipaddress.ip_address(one[1][0]).is_loopback]
    if not outside:
        raise RendezvousError(
            f"{address.text}: on this host the name {address.host} means {addresses[0][1][0]}, "
            "which other hosts cannot reach: correct its line in /etc/hosts, or " + _SET_IT
        )
    return outside


def listen(address: TcpAddress, backlog: int, deadline: float) -> list[socket.socket]:
    """Listens at this address only. Raises `RendezvousError` if that fails on this host."""
    until = min(deadline, time.monotonic() + PATIENCE_S)
    while True:
        try:
            return _listen(resolve(address), backlog)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                own = ", ".join(map(str, available_interfaces())) or "none"
                raise RendezvousError(
                    f"{address.text}: rank 0 must listen there, but runs on another host, whose "
                    f"addresses are {own}: {_SET_IT}"
                ) from None
            if time.monotonic() > until:
                raise RendezvousError(
                    f"{address.text}: rank 0 cannot listen there: {error.strerror}"
                ) from error
        time.sleep(_PAUSE_S)


def dial(addresses: list[Address], timeout_s: float) -> socket.socket:
    """Connects to the first address that accepts. Raises `OSError`."""
    failure: OSError | None = None
    for family, address in addresses:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(address)
            # If no process listens at a port of this host, the kernel may choose this port as the
            # source port, and the socket connects to itself.
            if connection.getsockname() != connection.getpeername():
                return connection
            failure = ConnectionRefusedError(errno.ECONNREFUSED, "no process listens")
        except OSError as error:
            failure = error
        connection.close()
    assert failure is not None
    raise failure


def keep_alive(connection: socket.socket) -> None:
    """Makes the kernel end an idle connection some seconds after the other host has died."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _listen(addresses: list[Address], backlog: int) -> list[socket.socket]:
    """Listens at the addresses that belong to this host. Raises `OSError` if none belongs to it."""
    listeners: list[socket.socket] = []
    foreign: OSError | None = None
    for family, address in addresses:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                for other in listeners:
                    other.close()
                raise
            foreign = error
        else:
            listeners.append(listener)
    if not listeners and foreign is not None:
        raise foreign
    return listeners


def _only_here(host: str) -> bool:
    """Returns True if the host is a loopback address or is named localhost."""
    if _is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host.lower().partition(".")[0] == "localhost"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
