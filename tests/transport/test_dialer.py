"""A listener that closes the connection after the dialer's proof: this may be a refusal or a
timeout.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from unisono.transport.connection import Connection
from unisono.transport.connection_setup import LEAST_WAIT_S
from unisono.transport.dialer import Dial, DialFailure, DialRequest
from unisono.transport.event_loop import EventLoop
from unisono.transport.handshake import PROOF_BYTES, Handshake
from unisono.transport.introduction import INTRODUCTION_BYTES, ConnectionKind, Introduction
from unisono.transport.security import CLEAR

SECRET, PURPOSE = b"known to both", b"dialing"


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    found = EventLoop()
    found.start("dialing")
    yield found
    found.call(found.end)
    assert found.join(5)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(10)
        yield sock


def accept_proof(listener: socket.socket) -> tuple[socket.socket, Handshake, bytes]:
    """Accepts a connection and receives the dialer's proof."""
    sock, _ = listener.accept()
    handshake = Handshake(SECRET, dialing=False, purpose=PURPOSE)
    sock.sendall(handshake.take(sock.recv(handshake.wanted_bytes, socket.MSG_WAITALL)))
    return sock, handshake, sock.recv(PROOF_BYTES, socket.MSG_WAITALL)


def dial(loop: EventLoop, listener: socket.socket) -> list[Connection | DialFailure]:
    """Connects to the listener. Returns a list that later receives the result."""
    ended: list[Connection | DialFailure] = []
    request = DialRequest(
        rank=0,
        address=listener.getsockname(),
        source=None,
        secret=SECRET,
        purpose=PURPOSE,
        security=CLEAR,
        introduction=Introduction(kind=ConnectionKind.CONTROL, rank=1, pid=1),
        host_s=0.5,
        process_s=10,
    )
    loop.call(lambda: Dial(loop, request, opened=ended.append, failed=ended.append))
    return ended


def wait_for_end(ended: list[Connection | DialFailure]) -> Connection | DialFailure:
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    return ended[0]


def test_a_listener_that_closes_at_once_refuses(loop: EventLoop, listener: socket.socket) -> None:
    ended = dial(loop, listener)
    accept_proof(listener)[0].close()
    failed = wait_for_end(ended)
    assert isinstance(failed, DialFailure)
    assert failed.impostor
    assert "same job secret" in failed.text


def test_a_listener_that_closes_late_may_have_timed_out(
    loop: EventLoop, listener: socket.socket
) -> None:
    """Tests that the dialer tries again if the listener closes a connection late, as after a
    timeout. The first attempt takes longer than the host may take to answer (`host_s`).
    """
    ended = dial(loop, listener)
    sock, _, _ = accept_proof(listener)
    time.sleep(LEAST_WAIT_S + 0.1)
    sock.close()
    sock, handshake, proof = accept_proof(listener)
    sock.sendall(handshake.take(proof))
    sock.recv(INTRODUCTION_BYTES, socket.MSG_WAITALL)
    opened = wait_for_end(ended)
    assert isinstance(opened, Connection)
    opened.close()
    sock.close()
