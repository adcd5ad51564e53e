"""Sockets between hosts: how they listen, how they dial, how long they bear silence.

While nobody waits for a peer, the kernel probes once a second, and gives up late: under a shorter
TCP_USER_TIMEOUT a probe or two that are lost in a short cut would end the connection. Who waits
looks for himself how long it lasts (`silence.py`).
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

# Of <netinet/tcp.h> and <netinet/in.h>; the socket module does not name them.
_IP_BIND_ADDRESS_NO_PORT = 24
_TCP_THIN_LINEAR_TIMEOUTS = 16
_TCP_RTO_MAX_MS = 44  # Linux 6.15

_LEAST_RTT_US = 148  # its place in struct tcp_info
_NAME_BYTES = 16  # of a congestion control

_NEAR_US = 3000  # the same region, not only the same room
_BACKLOG = 4096
_PROBE_S = 1
_LONGEST_RETRY_MS = 1000  # the shortest that the kernel allows


def show(address: Sequence[object]) -> str:
    """An address as people write it.

    >>> show(("10.77.0.1", 20000)), show(("fd00::1", 20000))
    ('10.77.0.1:20000', '[fd00::1]:20000')
    """
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def listen(addresses: Sequence[str], ports: range | None) -> list[socket.socket]:
    """Listens on each address, and on no other; on one port of `ports`, or on any.

    Raises `RendezvousError` if an address is not this host's, or all ports are taken.
    """
    tries: Iterable[int] = (0,) if ports is None else ports
    for port in tries:
        with contextlib.suppress(_TakenError):
            return _listen_all(addresses, port)
    first, last = (ports[0], ports[-1]) if ports else (0, 0)
    raise RendezvousError(
        f"all ports {first}-{last} of {', '.join(addresses)} are taken: UNISONO_PORTS must have "
        "a free port for each rank of this host"
    )


class _TakenError(Exception):
    """Somebody else has the port."""


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
        # Connections of an earlier job may linger in TIME_WAIT; two listeners never share a port.
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
            raise _TakenError from None
        raise RendezvousError(
            f"cannot listen on {show((address, port))}: {error.strerror}"
        ) from error


def family(address: str) -> socket.AddressFamily:
    """IPv4 or IPv6. Raises `RendezvousError` for what is no literal address."""
    for one in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(one, address)
            return one
    raise RendezvousError(f"{address!r} is not an IP address")


def dial(to: Address, source: str | None) -> socket.socket:
    """A socket whose connection has begun, from the address `source` if given. Does not block.

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
    """For every connection between ranks: no delay; what is sent has to be acknowledged in time.

    To survive shorter cuts, the kernel must retry shortly before it gives up: by itself it would
    double its pauses, and send again 0.2, 0.6, 1.4 and 3.0 s after the first time.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _user_timeout(sock, peer_timeout_s)
    for option, value in ((_TCP_THIN_LINEAR_TIMEOUTS, 1), (_TCP_RTO_MAX_MS, _LONGEST_RETRY_MS)):
        with contextlib.suppress(OSError):  # an older kernel: fewer short cuts are survived
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def send_at_once(sock: socket.socket) -> None:
    """For connections that carry data: not BBR, if the other host is near.

    BBR takes the pauses between the rounds of a collective for a slow path, and now and then holds
    back for tens of milliseconds what could leave. Where the path is long it stays, if the system
    has chosen it: there it saves more than it costs.
    """
    with contextlib.suppress(OSError):
        chosen = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
        if chosen.rstrip(b"\0") != b"bbr" or read_info(sock, _LEAST_RTT_US)[0] > _NEAR_US:
            return
    for name in (b"cubic", b"reno"):  # what a user may choose is the system's choice, and reno
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def read_info(sock: socket.socket, *places: int) -> tuple[int, ...]:
    """What the kernel says of a connection: numbers of 4 bytes, by their places in Linux' struct
    tcp_info."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, max(places) + 4)
    return tuple(struct.unpack_from("=I", info, at)[0] for at in places)


def retry_often(sock: socket.socket) -> None:
    """For connections on which little is sent: the kernel sends again each 0.2 s for 1.4 s, not
    after 0.2, 0.6 and 1.4 s. It does so (TCP_THIN_LINEAR_TIMEOUTS) where a loss has made the
    congestion control careful, which BBR, for one, never is."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def watch_idle(sock: socket.socket, peer_timeout_s: float) -> None:
    """Nobody waits: probe each second. No cut shorter than `peer_timeout_s` ends the connection."""
    # The last answer may be a probe older than the cut, and the last probe before the verdict too.
    _user_timeout(sock, peer_timeout_s + 2 * _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _user_timeout(sock: socket.socket, allowed_s: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(allowed_s * 1000))
