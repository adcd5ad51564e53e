"""Sockets between hosts: listening, dialing, and timeouts.

While a rank does not wait for a peer, the kernel sends one probe a second, and ends the connection
only after a long silence. Under a shorter TCP_USER_TIMEOUT, one or two probes lost in a short
interruption would end the connection. A waiting rank measures the silence itself (`silence.py`).
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterable, Sequence

from unisono.errors import RendezvousError

Address = tuple[str, int]
"""An IP address as a literal, and a port."""

# From <netinet/tcp.h> and <netinet/in.h>; the socket module does not define them.
_IP_BIND_ADDRESS_NO_PORT = 24
_TCP_THIN_LINEAR_TIMEOUTS = 16
_TCP_RTO_MAX_MS = 44  # since Linux 6.15

_LEAST_RTT_US = 148  # offset of tcpi_min_rtt in struct tcp_info
_NAME_BYTES = 16  # maximum length of the name of a congestion control

_NEAR_US = 3000  # longest round trip within one region
_BACKLOG = 4096
_PROBE_S = 1
_LONGEST_RETRY_MS = 1000  # the smallest value that the kernel permits


def format_address(address: Sequence[object]) -> str:
    """Formats an address.

    >>> format_address(("10.77.0.1", 20000)), format_address(("fd00::1", 20000))
    ('10.77.0.1:20000', '[fd00::1]:20000')
    """
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def listen(addresses: Sequence[str], ports: range | None) -> list[socket.socket]:
    """Listens on these addresses only, all with the same port of `ports`, or with any free port.

    Raises `RendezvousError` if an address is not this host's, or all ports are taken.
    """
    tries: Iterable[int] = (0,) if ports is None else ports
    for port in tries:
        with contextlib.suppress(_PortTakenError):
            return _listen_all(addresses, port)
    first, last = (ports[0], ports[-1]) if ports else (0, 0)
    raise RendezvousError(
        f"all ports {first}-{last} of {', '.join(addresses)} are taken: UNISONO_PORTS must have "
        "a free port for each rank of this host"
    )


class _PortTakenError(Exception):
    """Raised if another process has the port."""


def _listen_all(addresses: Sequence[str], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    try:
        for address in addresses:
            listeners.append(_listen_one(address, port))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen_one(address: str, port: int) -> socket.socket:
    listener = socket.socket(family(address), socket.SOCK_STREAM)
    try:
        # Connections of an earlier job may be in TIME_WAIT. Two listeners still cannot share a
        # port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE and port:
            raise _PortTakenError from None
        raise RendezvousError(
            f"cannot listen on {format_address((address, port))}: {error.strerror}"
        ) from error


def family(address: str) -> socket.AddressFamily:
    """Returns the address family, IPv4 or IPv6. Raises `RendezvousError` if the text is not an IP
    literal.
    """
    for one in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(one, address)
            return one
    raise RendezvousError(f"{address!r} is not an IP address")


def dial(to: Address, source: str | None) -> socket.socket:
    """Returns a socket that has begun to connect, from the local address `source` if given. Does
    not block.

    Raises `OSError` if the kernel refuses at once.
    """
    sock = socket.socket(family(to[0]), socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if source is not None and family(source) == sock.family:
            sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source, 0))
        begun = sock.connect_ex(to)
        if begun not in (0, errno.EINPROGRESS):
            raise OSError(begun, errno.errorcode.get(begun, "unknown"))
        return sock
    except BaseException:
        sock.close()
        raise


def prepare(sock: socket.socket, peer_timeout_s: float) -> None:
    """Sets options of every connection between ranks: no delay, and a limit for acknowledgements.

    To survive interruptions shorter than the limit, the kernel must retry shortly before the limit.
    By default the kernel doubles its pauses, and retries 0.2, 0.6, 1.4 and 3.0 s after the first
    attempt.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _user_timeout(sock, peer_timeout_s)
    for option, value in ((_TCP_THIN_LINEAR_TIMEOUTS, 1), (_TCP_RTO_MAX_MS, _LONGEST_RETRY_MS)):
        # An older kernel lacks the second option, so connections survive fewer short interruptions.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def avoid_bbr(sock: socket.socket) -> None:
    """Sets options of connections that carry data: replaces BBR if the other host is near.

    BBR treats the pauses between the rounds of a collective as a slow path, and sometimes delays
    data by tens of milliseconds. On long paths, BBR remains if the system has chosen it, since its
    gain is larger than its cost.
    """
    with contextlib.suppress(OSError):
        chosen = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
        if chosen.rstrip(b"\0") != b"bbr" or read_info(sock, _LEAST_RTT_US)[0] > _NEAR_US:
            return
    # unprivileged processes may choose the system's default and reno
    for name in (b"cubic", b"reno"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def read_info(sock: socket.socket, *offsets: int) -> tuple[int, ...]:
    """Returns 4-byte fields of Linux' struct tcp_info, given their offsets."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, max(offsets) + 4)
    return tuple(struct.unpack_from("=I", info, at)[0] for at in offsets)


def retry_often(sock: socket.socket) -> None:
    """Makes the kernel retry every 0.2 s for 1.4 s, instead of after 0.2, 0.6 and 1.4 s. For
    connections with little data.

    The kernel applies this option (TCP_THIN_LINEAR_TIMEOUTS) only if the congestion control reacts
    to losses; BBR does not react.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def probe_idle(sock: socket.socket, peer_timeout_s: float) -> None:
    """Probes an idle connection each second. An interruption shorter than `peer_timeout_s` does not
    end it."""
    # Add two probe intervals: the last answer may arrive up to one interval before the
    # interruption, and the last probe may be sent up to one interval before the limit.
    _user_timeout(sock, peer_timeout_s + 2 * _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _user_timeout(sock: socket.socket, allowed_s: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(allowed_s * 1000))
