"""What sockets between hosts are set to."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.transport.sockets import send_at_once

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with dialed, accepted:
            yield dialed, accepted


def congestion(sock: socket.socket) -> str:
    """The congestion control of a connection."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def choose(sock: socket.socket, name: str) -> None:
    """Set it; skips where it cannot be had."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError:
        pytest.skip(f"this machine has no {name}: {AVAILABLE.read_text().strip()}")


def test_a_near_peer_is_not_sent_to_by_bbr(pair: tuple[socket.socket, socket.socket]) -> None:
    for sock in pair:
        choose(sock, "bbr")
        send_at_once(sock)
        assert congestion(sock) in ("cubic", "reno")


def test_any_other_choice_of_the_system_stays(pair: tuple[socket.socket, socket.socket]) -> None:
    for sock in pair:
        choose(sock, "reno")
        send_at_once(sock)
        assert congestion(sock) == "reno"


def test_a_far_peer_keeps_what_the_system_has_chosen(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.transport.sockets._NEAR_US", 0)  # any round trip is longer
    for sock in pair:
        choose(sock, "bbr")
        send_at_once(sock)
        assert congestion(sock) == "bbr"
