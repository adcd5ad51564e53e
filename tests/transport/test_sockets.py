"""Options of sockets between hosts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.transport.sockets import avoid_bbr

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yields both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with dialed, accepted:
            yield dialed, accepted


def congestion(sock: socket.socket) -> str:
    """Returns the congestion control of a connection."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def choose(sock: socket.socket, name: str) -> None:
    """Sets the congestion control of a connection. Skips the test if the kernel lacks it."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError:
        pytest.skip(f"this machine has no {name}: {AVAILABLE.read_text().strip()}")


def test_bbr_is_replaced_for_a_near_peer(pair: tuple[socket.socket, socket.socket]) -> None:
    for sock in pair:
        choose(sock, "bbr")
        avoid_bbr(sock)
        assert congestion(sock) in ("cubic", "reno")


def test_other_congestion_controls_stay(pair: tuple[socket.socket, socket.socket]) -> None:
    for sock in pair:
        choose(sock, "reno")
        avoid_bbr(sock)
        assert congestion(sock) == "reno"


def test_bbr_stays_for_a_far_peer(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    # every round trip time exceeds this limit
    monkeypatch.setattr("unisono.transport.sockets._NEAR_US", 0)
    for sock in pair:
        choose(sock, "bbr")
        avoid_bbr(sock)
        assert congestion(sock) == "bbr"
