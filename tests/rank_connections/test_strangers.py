"""Processes that are not ranks connect while ranks work. They are refused; the job continues."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import time
from collections.abc import Iterator

import pytest

from connection_managers import SECRET, WORLD, Rank, Recorder, exchange, wait_until, world
from ranks import no_descriptors
from time_limits import PATIENCE_S, cpu_since, cpu_times, limit_s, threads
from unisono.errors import AuthenticationError
from unisono.rank_connections.control_messages import (
    MOST_FRAME_BYTES,
    ControlMessage,
    MessageKind,
    pack_failure,
)
from unisono.rank_connections.group_endpoint import OVERDUE_EVENT, Fault
from unisono.transport import acceptor
from unisono.transport.handshake import Handshake, authenticate
from unisono.transport.introduction import ConnectionKind, Introduction, purpose_of

GROUP = b"a group"


@pytest.fixture
def job(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    """Yields two ranks. Afterwards checks that they have not failed and can still connect.

    They refuse no connection only because it is silent for some seconds.
    """
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 1000.0)
    caplog.set_level(logging.WARNING, "unisono")
    with world(2) as ranks:
        ends = [member.enter(GROUP, range(2)) for member in ranks]
        yield ranks
        _still_works(ranks, ends)


def _still_works(ranks: list[Rank], ends: list[Recorder]) -> None:
    for member in ranks:
        member.manager.reach(GROUP, range(2), 0)
    wait_until(lambda: all(end.sockets for end in ends))
    exchange(ends[0], ends[1], 0, 1)
    assert [end.failure() for end in ends] == [None, None]


def _connect(member: Rank) -> socket.socket:
    sock = socket.create_connection(member.manager.bound[0], timeout=PATIENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _proved(member: Rank, sent: Introduction) -> socket.socket:
    """Connects to a rank, proves that it knows the job's secret, and sends this introduction."""
    sock = _connect(member)
    purpose = purpose_of(WORLD, member.rank)
    deadline = time.monotonic() + PATIENCE_S
    key = authenticate(sock, SECRET, dialing=True, purpose=purpose, deadline=deadline)
    sock.sendall(sent.pack(key))
    return sock


def _wait_for_close(sock: socket.socket, within_s: float = PATIENCE_S) -> None:
    """Waits until the other end has closed the connection. Raises `TimeoutError`."""
    sock.settimeout(within_s)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass


def test_a_port_scan_is_logged_once(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(300):
        _connect(job[0]).close()
    wait_until(lambda: caplog.records)
    time.sleep(0.1)
    assert len(caplog.records) == 1  # one record for all 300 connections
    assert "refused a connection from 127.0.0.1" in caplog.text


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 2,
        random.Random(1).randbytes(4096),
        b"\xff" * 40,
        bytes(100_000),
    ],
)
def test_random_bytes_are_refused(
    job: list[Rank], sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with _connect(job[0]) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(sent)
        _wait_for_close(sock)
    wait_until(lambda: "not a unisono rank" in caplog.text)


def test_a_wrong_secret_is_refused(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    with _connect(job[1]) as sock, pytest.raises(AuthenticationError):
        purpose, deadline = purpose_of(WORLD, 1), time.monotonic() + PATIENCE_S
        authenticate(sock, b"wrong", dialing=True, purpose=purpose, deadline=deadline)
    wait_until(lambda: "does not know the job's secret" in caplog.text)


class _RecordedHandshake:
    """The messages that the dialer sends in a successful handshake, recorded for a replay."""

    def __init__(self, member: Rank) -> None:
        self.recorded: list[bytes] = []
        with _connect(member) as sock:
            dialer = Handshake(SECRET, dialing=True, purpose=purpose_of(WORLD, member.rank))
            sent = dialer.opening
            while True:
                self.recorded.append(sent)
                sock.sendall(sent)
                if not dialer.wanted_bytes:
                    break
                sent = dialer.take(sock.recv(dialer.wanted_bytes, socket.MSG_WAITALL))
                if not sent:
                    introduction = Introduction(kind=ConnectionKind.COLLECTIVES, rank=1, pid=1)
                    sent = introduction.pack(dialer.key)


def test_a_replayed_handshake_is_refused(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    recorded = _RecordedHandshake(job[0]).recorded
    assert [len(message) for message in recorded[:2]] == [40, 32]
    with _connect(job[0]) as sock:
        for message in recorded:
            with contextlib.suppress(OSError):
                sock.sendall(message)
        _wait_for_close(sock)
    wait_until(lambda: "does not know the job's secret" in caplog.text)


def test_a_reflected_greeting_is_refused(job: list[Rank]) -> None:
    with _connect(job[0]) as sock:
        sock.sendall(Handshake(SECRET, dialing=True, purpose=b"").opening)
        sock.sendall(sock.recv(40, socket.MSG_WAITALL)[:32])
        _wait_for_close(sock)


def test_a_slow_stranger_is_refused(job: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.5)
    greeting = b"unisono1" + bytes(32)
    sent = 0
    with _connect(job[0]) as sock, contextlib.suppress(OSError):
        while sent < len(greeting):
            sock.sendall(greeting[sent : sent + 1])
            sent += 1
            time.sleep(0.4)  # the whole greeting takes 16 s
    assert 1 < sent < len(greeting)


def test_a_crowd_of_strangers_makes_room(job: list[Rank]) -> None:
    crowd = [_connect(job[0]) for _ in range(2 * acceptor.MOST_PENDING)]
    _still_works(job, [member.ends[GROUP] for member in job])
    for sock in crowd:
        sock.close()


@pytest.mark.parametrize(
    "sent",
    [
        Introduction(kind=ConnectionKind.COLLECTIVES, rank=2, pid=1),
        Introduction(kind=ConnectionKind.COLLECTIVES, rank=0, pid=1),
        Introduction(kind=ConnectionKind.CONTROL, rank=1, pid=1),
    ],
)
def test_an_impossible_rank_is_refused(job: list[Rank], sent: Introduction) -> None:
    with _proved(job[0], sent) as sock:
        _wait_for_close(sock)


def test_a_changed_introduction_is_refused(
    job: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    with _connect(job[0]) as sock:
        purpose, deadline = purpose_of(WORLD, 0), time.monotonic() + PATIENCE_S
        key = authenticate(sock, SECRET, dialing=True, purpose=purpose, deadline=deadline)
        sent = Introduction(kind=ConnectionKind.COLLECTIVES, rank=1, pid=1).pack(key)
        sock.sendall(sent[:4] + b"\x02" + sent[5:])
        _wait_for_close(sock)
    wait_until(lambda: "changed in transit" in caplog.text)


def test_parked_connections_are_bounded(job: list[Rank]) -> None:
    sent = Introduction(kind=ConnectionKind.COLLECTIVES, rank=1, pid=1, tag=b"unknown" + bytes(25))
    held = [_proved(job[0], sent) for _ in range(256)]
    with _proved(job[0], sent) as one_too_many:
        _wait_for_close(one_too_many)
    for sock in held:
        sock.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 4096,
        (MOST_FRAME_BYTES + 1).to_bytes(4, "little") + bytes(60),
        ControlMessage(kind=MessageKind.FAILED, origin=2, to=(0, 1), body=b"x").pack(),
        ControlMessage(kind=MessageKind.LEFT, origin=0, to=(0, 1)).pack(),
        ControlMessage(kind=MessageKind.LEFT, origin=2, to=(0, 70_000)).pack(),
        ControlMessage(kind=MessageKind.LOST, origin=2).pack(),
        ControlMessage(kind=MessageKind.LAST_CALLS, origin=2, body=b"x").pack(),
    ],
)
def test_a_rank_that_sends_garbage_is_lost(garbage: bytes) -> None:
    """Sends random bytes from rank 2, which is authenticated."""
    with world(3) as ranks:
        ends = [member.enter(GROUP, range(3)) for member in ranks]
        channel = ranks[2].manager._world_connections._world_group._endpoint._channel
        ranks[2].manager._loop.run(lambda: channel._sock.sendall(garbage), 1)
        wait_until(lambda: all(end.failure() for end in ends))
        # rank 2 must fail too; otherwise ranks of its host would report that rank 0 is lost
        for end in ends:
            fault, text = end.failure() or (0, "")
            assert fault == Fault.PEER_LOST
            assert f"rank 2 (host 127.0.0.1, pid {os.getpid()}) sent a malformed message" in text


def test_an_unknown_fault_is_a_failure() -> None:
    with world(3) as ranks:
        ends = [member.enter(GROUP, range(3)) for member in ranks]
        channel = ranks[2].manager._world_connections._world_group._endpoint._channel
        tag, told = ranks[2].tag(GROUP), pack_failure(99, "too warm")
        failed = ControlMessage(kind=MessageKind.FAILED, origin=2, tag=tag, to=(0, 1), body=told)
        left = ControlMessage(kind=MessageKind.LEFT, origin=2, tag=tag, to=(0, 1))
        ranks[2].manager._loop.run(lambda: channel._sock.sendall(failed.pack() + left.pack()), 1)
        wait_until(lambda: all(2 in end.left for end in ends[:2]))  # the channel still works
        assert [end.failure() for end in ends[:2]] == [(Fault.SYSTEM, "too warm")] * 2


def test_a_message_that_cannot_be_handled_ends_its_channel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Raises an error in the library's message handler. The channel must then be closed, since an
    unread channel would appear to be alive.
    """

    class Broken(Recorder):
        def called(self) -> bytes:
            raise RuntimeError("a bug")

    with world(3) as ranks:
        ends = [
            member.enter(GROUP, range(3), None if member.rank else Broken()) for member in ranks
        ]
        ranks[0].manager._loop.run(lambda: None, 1)  # waits until rank 0 has entered the group
        ends[1].raise_events(OVERDUE_EVENT)  # rank 1 then asks rank 0 for its most recent call
        wait_until(lambda: all(end.failure() for end in ends))
        for end in ends:
            fault, text = end.failure() or (0, "")
            assert fault == Fault.PEER_LOST
            assert text.startswith("rank 1 (") and "failed to handle: RuntimeError: a bug" in text
    assert "unisono failed to handle a message" in caplog.text


def test_half_a_frame_waits_for_the_other_half() -> None:
    with world(2) as ranks:
        ends = [member.enter(GROUP, range(2)) for member in ranks]
        channel = ranks[1].manager._world_connections._world_group._endpoint._channel
        frame = ControlMessage(
            kind=MessageKind.LEFT, origin=1, tag=ranks[1].tag(GROUP), to=(0,)
        ).pack()
        ranks[1].manager._loop.run(lambda: channel._sock.sendall(frame[:20]), 1)
        time.sleep(0.05)
        assert not ends[0].left
        ranks[1].manager._loop.run(lambda: channel._sock.sendall(frame[20:]), 1)
        wait_until(lambda: ends[0].left)


def test_exhausted_descriptors_end_in_a_named_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "unisono")
    before = threads()
    with world(2) as ranks:
        end = ranks[0].enter(GROUP, range(2))
        outside = socket.socket()
        used = cpu_times(threads() - before)
        with outside, no_descriptors():
            ranks[0].manager.reach(GROUP, [1], 0)
            begun = time.monotonic()
            outside.connect(ranks[0].manager.bound[0])
            wait_until(end.failure)
            assert time.monotonic() - begun < limit_s(3.5)
        assert cpu_since(used) < 0.5  # the threads did not poll meanwhile
        fault, text = end.failure() or (0, "")
        assert fault == Fault.SYSTEM
        assert "rank 0 cannot accept ranks [1]: no descriptors are left (ulimit -n is" in text
        assert sum("no descriptors" in record.message for record in caplog.records) == 1


def test_a_brief_shortage_of_descriptors_is_survived(job: list[Rank]) -> None:
    outside = socket.socket()
    with outside, no_descriptors():
        outside.connect(job[0].manager.bound[0])
        time.sleep(0.5)


def test_a_missing_descriptor_for_a_dial_is_named() -> None:
    with world(2) as ranks:
        ends = [member.enter(GROUP, range(2)) for member in ranks]
        with no_descriptors():
            ranks[1].manager.reach(GROUP, [0], 0)
            wait_until(lambda: ends[0].failure() and ends[1].failure())
        for end in ends:
            fault, text = end.failure() or (0, "")
            assert fault == Fault.SYSTEM
            assert "no descriptors are left here" in text
