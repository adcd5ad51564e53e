"""Messages come out as they went in, however the bytes are cut; nothing else comes out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.control.group_endpoint import Fault, fault_of
from unisono.control.messages import (
    CALLED_BYTES,
    MOST_FRAME_BYTES,
    ControlMessage,
    Frames,
    MessageKind,
    failed_body,
    looked_bodies,
    read_failed,
    read_looked,
    read_welcome,
)
from unisono.errors import AuthenticationError
from unisono.transport.introduction import (
    INTRODUCTION_BYTES,
    ConnectionKind,
    Introduction,
    tag_of,
    unpack,
)

ranks = st.integers(0, 2**32 - 1)
messages = st.builds(
    ControlMessage,
    say=st.sampled_from(MessageKind),
    origin=ranks,
    tag=st.binary(min_size=32, max_size=32),
    to=st.lists(ranks, max_size=20).map(tuple),
    body=st.binary(max_size=200),
)


@given(st.lists(messages, max_size=5), st.lists(st.integers(1, 60), min_size=1))
def test_however_the_bytes_are_cut(said: list[ControlMessage], cuts: list[int]) -> None:
    data = b"".join(message.pack() for message in said)
    frames, came, number = Frames(), [], 0
    while data:
        cut = cuts[number % len(cuts)]
        came += frames.take(data[:cut])
        data, number = data[cut:], number + 1
    assert came == said


@given(st.binary(max_size=300))
def test_random_bytes_are_messages_or_refused(data: bytes) -> None:
    try:
        for message in Frames().take(data):
            assert len(message.pack()) <= len(data)
    except ValueError as error:
        assert "no message" in str(error)


@pytest.mark.parametrize("length", [MOST_FRAME_BYTES + 1, 2**32 - 1])
def test_frames_too_long_are_refused_before_they_come(length: int) -> None:
    frame = bytearray(ControlMessage(say=MessageKind.LEFT, origin=1).pack())
    frame[:4] = length.to_bytes(4, "little")
    with pytest.raises(ValueError, match=f"malformed message: {length} bytes"):
        list(Frames().take(bytes(frame)))


def test_more_receivers_than_bytes_are_refused() -> None:
    frame = ControlMessage(say=MessageKind.LEFT, origin=1, to=(1, 2)).pack()
    frame = frame[:-12] + (3).to_bytes(4, "little") + frame[-8:]
    with pytest.raises(ValueError, match="to 3 ranks"):
        list(Frames().take(frame))


@given(ranks, st.text(max_size=3000))
def test_failures(fault: int, text: str) -> None:
    found, told = read_failed(failed_body(fault, text))
    assert found == fault_of(fault)
    assert found in list(Fault)
    # What is too long loses its end, maybe in the middle of a character.
    assert told == text or text.startswith(told.rstrip("\ufffd"))


@given(
    st.lists(
        st.tuples(ranks, st.binary(min_size=CALLED_BYTES, max_size=CALLED_BYTES)), max_size=2500
    )
)
def test_calls(called: list[tuple[int, bytes]]) -> None:
    bodies = looked_bodies(called)
    assert bodies
    assert [one for body in bodies for one in read_looked(body)] == called
    assert all(len(body) < MOST_FRAME_BYTES for body in bodies)


@given(st.binary(max_size=100))
def test_bodies_of_random_bytes(body: bytes) -> None:
    for read in (read_failed, read_looked, read_welcome):
        try:
            read(body)
        except ValueError as error:
            assert f"{len(body)} bytes" in str(error)


introductions = st.integers(1, 1024).flatmap(
    lambda streams: st.builds(
        Introduction,
        kind=st.sampled_from(ConnectionKind),
        rank=ranks,
        pid=ranks,
        tag=st.binary().map(tag_of),
        stream=st.integers(0, streams - 1),
        streams=st.just(streams),
    )
)


@given(introductions)
def test_introductions(said: Introduction) -> None:
    data = said.pack(b"key")
    assert len(data) == INTRODUCTION_BYTES
    assert unpack(data, b"key") == said
    with pytest.raises(AuthenticationError):
        unpack(data, b"kex")


def test_every_changed_bit_of_an_introduction_is_refused() -> None:
    data = Introduction(kind=ConnectionKind.MAIL, rank=3, pid=812, tag=tag_of(b"a")).pack(b"key")
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AuthenticationError, match="changed in transit"):
            unpack(bytes(changed), b"key")


def test_an_introduction_without_sense() -> None:
    for streams in (0, 1, 1025):
        said = Introduction(kind=ConnectionKind.MAIL, rank=3, pid=1, stream=1, streams=streams)
        with pytest.raises(AuthenticationError, match="without sense"):
            unpack(said.pack(b"key"), b"key")
