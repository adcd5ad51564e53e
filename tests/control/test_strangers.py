"""Strangers of all kinds come while ranks work; they are refused, and the job goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import time
from collections.abc import Iterator

import pytest

from connection_managers import SECRET, WORLD, Place, Recorder, exchange, wait_until, world
from ranks import no_descriptors
from unisono.control.group_endpoint import ANXIOUS_EVENT, Fault
from unisono.control.messages import MOST_FRAME_BYTES, ControlMessage, MessageKind, failed_body
from unisono.errors import AuthenticationError
from unisono.transport import acceptor
from unisono.transport.handshake import Handshake, authenticate
from unisono.transport.introduction import ConnectionKind, Introduction, purpose_of

GROUP = b"a group"


@pytest.fixture
def job(caplog: pytest.LogCaptureFixture) -> Iterator[list[Place]]:
    """Two ranks, which afterwards still can connect and have noticed nothing."""
    caplog.set_level(logging.WARNING, "unisono")
    with world(2) as places:
        ends = [place.enter(GROUP, range(2)) for place in places]
        yield places
        _still_works(places, ends)


def _still_works(places: list[Place], ends: list[Recorder]) -> None:
    for place in places:
        place.porter.reach(GROUP, range(2), 0)
    wait_until(lambda: all(end.sockets for end in ends), 10)
    exchange(ends[0], ends[1], 0, 1)
    assert [end.failure() for end in ends] == [None, None]


def _connect(place: Place) -> socket.socket:
    sock = socket.create_connection(place.porter.bound[0], timeout=8)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _proved(place: Place, said: Introduction) -> socket.socket:
    """A connection of somebody who knows the secret, and introduces itself so."""
    sock = _connect(place)
    purpose = purpose_of(WORLD, place.rank)
    deadline = time.monotonic() + 5
    key = authenticate(sock, SECRET, dialing=True, purpose=purpose, deadline=deadline)
    sock.sendall(said.pack(key))
    return sock


def _is_closed_in(sock: socket.socket, within_s: float) -> bool:
    sock.settimeout(within_s)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass
    return True


def test_a_scan_of_the_ports(job: list[Place], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(300):
        _connect(job[0]).close()
    wait_until(lambda: caplog.records)
    time.sleep(0.1)
    assert len(caplog.records) == 1  # one line, not 300
    assert "refused a connection from 127.0.0.1" in caplog.text


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 2,
        random.Random(1).randbytes(4096),
        b"\xff" * 40,
        bytes(100_000),
    ],
)
def test_random_bytes(job: list[Place], said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with _connect(job[0]) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(said)
        assert _is_closed_in(sock, 2)
    wait_until(lambda: "not a unisono rank" in caplog.text)


def test_a_wrong_secret(job: list[Place], caplog: pytest.LogCaptureFixture) -> None:
    with _connect(job[1]) as sock, pytest.raises(AuthenticationError):
        purpose, deadline = purpose_of(WORLD, 1), time.monotonic() + 5
        authenticate(sock, b"wrong", dialing=True, purpose=purpose, deadline=deadline)
    wait_until(lambda: "does not know the job's secret" in caplog.text)


class _Wire:
    """Two ends of a handshake with somebody between who keeps what the dialer says."""

    def __init__(self, place: Place) -> None:
        self.recorded: list[bytes] = []
        with _connect(place) as sock:
            dialer = Handshake(SECRET, dialing=True, purpose=purpose_of(WORLD, place.rank))
            said = dialer.opening
            while True:
                self.recorded.append(said)
                sock.sendall(said)
                if not dialer.wanted_bytes:
                    break
                said = dialer.take(sock.recv(dialer.wanted_bytes, socket.MSG_WAITALL))
                if not said:
                    introduction = Introduction(kind=ConnectionKind.COLLECTIVES, rank=1, pid=1)
                    said = introduction.pack(dialer.key)


def test_a_recording_is_refused(job: list[Place], caplog: pytest.LogCaptureFixture) -> None:
    recorded = _Wire(job[0]).recorded
    assert [len(message) for message in recorded[:2]] == [40, 32]
    with _connect(job[0]) as sock:
        for message in recorded:
            with contextlib.suppress(OSError):
                sock.sendall(message)
        assert _is_closed_in(sock, 2)
    wait_until(lambda: "does not know the job's secret" in caplog.text)


def test_a_mirror_is_refused(job: list[Place]) -> None:
    with _connect(job[0]) as sock:
        sock.sendall(Handshake(SECRET, dialing=True, purpose=b"").opening)
        sock.sendall(sock.recv(40, socket.MSG_WAITALL)[:32])
        assert _is_closed_in(sock, 2)


def test_a_slow_stranger(job: list[Place], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "STRANGER_S", 0.5)
    with _connect(job[0]) as sock:
        begun = time.monotonic()
        with pytest.raises(OSError):
            for byte in b"unisono1" + bytes(32):
                sock.sendall(bytes([byte]))
                time.sleep(0.1)
        assert time.monotonic() - begun < 1.5


def test_a_crowd_of_strangers_makes_room(job: list[Place]) -> None:
    crowd = [_connect(job[0]) for _ in range(2 * acceptor.MOST_STRANGERS)]
    ends = [place.ends[GROUP] for place in job]
    begun = time.monotonic()
    _still_works(job, ends)
    assert time.monotonic() - begun < 4
    for sock in crowd:
        sock.close()


@pytest.mark.parametrize(
    "said",
    [
        Introduction(kind=ConnectionKind.COLLECTIVES, rank=2, pid=1),
        Introduction(kind=ConnectionKind.COLLECTIVES, rank=0, pid=1),
        Introduction(kind=ConnectionKind.STAR, rank=1, pid=1),
    ],
)
def test_a_rank_that_cannot_be(job: list[Place], said: Introduction) -> None:
    with _proved(job[0], said) as sock:
        assert _is_closed_in(sock, 2)


def test_a_changed_introduction(job: list[Place], caplog: pytest.LogCaptureFixture) -> None:
    with _connect(job[0]) as sock:
        purpose, deadline = purpose_of(WORLD, 0), time.monotonic() + 5
        key = authenticate(sock, SECRET, dialing=True, purpose=purpose, deadline=deadline)
        said = Introduction(kind=ConnectionKind.COLLECTIVES, rank=1, pid=1).pack(key)
        sock.sendall(said[:4] + b"\x02" + said[5:])
        assert _is_closed_in(sock, 2)
    wait_until(lambda: "changed in transit" in caplog.text)


def test_parked_connections_are_bounded(job: list[Place]) -> None:
    said = Introduction(kind=ConnectionKind.COLLECTIVES, rank=1, pid=1, tag=b"unknown" + bytes(25))
    held = [_proved(job[0], said) for _ in range(256)]
    with _proved(job[0], said) as one_too_many:
        assert _is_closed_in(one_too_many, 2)
    for sock in held:
        sock.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 4096,
        (MOST_FRAME_BYTES + 1).to_bytes(4, "little") + bytes(60),
        ControlMessage(say=MessageKind.FAILED, origin=2, to=(0, 1), body=b"x").pack(),
        ControlMessage(say=MessageKind.LEFT, origin=0, to=(0, 1)).pack(),
        ControlMessage(say=MessageKind.LEFT, origin=2, to=(0, 70_000)).pack(),
        ControlMessage(say=MessageKind.GONE, origin=2).pack(),
        ControlMessage(say=MessageKind.LOOKED, origin=2, body=b"x").pack(),
    ],
)
def test_garbage_of_a_rank_is_its_end(garbage: bytes) -> None:
    """Not of a stranger: of somebody who proved that it is rank 2."""
    with world(3) as places:
        ends = [place.enter(GROUP, range(3)) for place in places]
        line = places[2].porter._joined._world._star._line
        places[2].porter._loop.run(lambda: line._sock.sendall(garbage), 1)
        wait_until(lambda: all(end.failure() for end in ends))
        for end in ends:  # its own too: else the ranks of its host would hear that rank 0 is gone
            fault, text = end.failure() or (0, "")
            assert fault == Fault.PEER_LOST
            assert f"rank 2 (host 127.0.0.1, pid {os.getpid()}) sent a malformed message" in text


def test_a_fault_of_another_version_is_a_failure_all_the_same() -> None:
    with world(3) as places:
        ends = [place.enter(GROUP, range(3)) for place in places]
        line = places[2].porter._joined._world._star._line
        tag, told = places[2].tag(GROUP), failed_body(99, "too warm")
        failed = ControlMessage(say=MessageKind.FAILED, origin=2, tag=tag, to=(0, 1), body=told)
        left = ControlMessage(say=MessageKind.LEFT, origin=2, tag=tag, to=(0, 1))
        places[2].porter._loop.run(lambda: line._sock.sendall(failed.pack() + left.pack()), 1)
        wait_until(lambda: all(2 in end.left for end in ends[:2]))  # and the line goes on
        assert [end.failure() for end in ends[:2]] == [(Fault.SYSTEM, "too warm")] * 2


def test_a_message_that_cannot_be_handled_ends_its_line(caplog: pytest.LogCaptureFixture) -> None:
    """An error of our own, too: a line that nobody reads any more must not look alive."""

    class Broken(Recorder):
        def called(self) -> bytes:
            raise RuntimeError("a bug")

    with world(3) as places:
        ends = [place.enter(GROUP, range(3), None if place.rank else Broken()) for place in places]
        places[0].porter._loop.run(lambda: None, 1)  # it has entered
        ends[1].raise_events(ANXIOUS_EVENT)  # so rank 0 is asked what it called
        wait_until(lambda: all(end.failure() for end in ends))
        for end in ends:
            fault, text = end.failure() or (0, "")
            assert fault == Fault.PEER_LOST
            assert text.startswith("rank 1 (") and "failed to handle: RuntimeError: a bug" in text
    assert "unisono failed to handle a message" in caplog.text


def test_half_a_frame_waits_for_its_other_half() -> None:
    with world(2) as places:
        ends = [place.enter(GROUP, range(2)) for place in places]
        line = places[1].porter._joined._world._star._line
        frame = ControlMessage(
            say=MessageKind.LEFT, origin=1, tag=places[1].tag(GROUP), to=(0,)
        ).pack()
        places[1].porter._loop.run(lambda: line._sock.sendall(frame[:20]), 1)
        time.sleep(0.05)
        assert not ends[0].left
        places[1].porter._loop.run(lambda: line._sock.sendall(frame[20:]), 1)
        wait_until(lambda: ends[0].left)


def test_exhausted_descriptors_end_in_a_named_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "unisono")
    with world(2) as places:
        end = places[0].enter(GROUP, range(2))
        outside = socket.socket()
        with outside, no_descriptors():
            places[0].porter.reach(GROUP, [1], 0)
            begun, busy = time.monotonic(), time.process_time()
            outside.connect(places[0].porter.bound[0])
            wait_until(end.failure)
            assert time.monotonic() - begun < 3.5
            assert time.process_time() - busy < 0.5  # it does not spin meanwhile
        fault, text = end.failure() or (0, "")
        assert fault == Fault.SYSTEM
        assert "rank 0 cannot accept ranks [1]: no descriptors are left (ulimit -n is" in text
        assert sum("no descriptors" in record.message for record in caplog.records) == 1


def test_short_of_descriptors_for_a_moment(job: list[Place]) -> None:
    outside = socket.socket()
    with outside, no_descriptors():
        outside.connect(job[0].porter.bound[0])
        time.sleep(0.5)


def test_no_descriptor_to_dial_with() -> None:
    with world(2) as places:
        ends = [place.enter(GROUP, range(2)) for place in places]
        with no_descriptors():
            places[1].porter.reach(GROUP, [0], 0)
            wait_until(lambda: ends[0].failure() and ends[1].failure())
        for end in ends:
            fault, text = end.failure() or (0, "")
            assert fault == Fault.SYSTEM
            assert "no descriptors are left here" in text
