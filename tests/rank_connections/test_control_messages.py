"""Control messages survive packing and any division of the bytes; malformed bytes are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import AuthenticationError
from unisono.rank_connections.control_messages import (
    CALLED_BYTES,
    MOST_FRAME_BYTES,
    ControlMessage,
    Frames,
    MessageKind,
    pack_failure,
    pack_last_calls,
    unpack_failure,
    unpack_last_calls,
    unpack_welcome,
)
from unisono.rank_connections.group_endpoint import Fault, fault_of
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
    kind=st.sampled_from(MessageKind),
    origin=ranks,
    tag=st.binary(min_size=32, max_size=32),
    to=st.lists(ranks, max_size=20).map(tuple),
    body=st.binary(max_size=200),
)


@given(st.lists(messages, max_size=5), st.lists(st.integers(1, 60), min_size=1))
def test_messages_survive_any_split_of_the_bytes(
    sent: list[ControlMessage], cuts: list[int]
) -> None:
    data = b"".join(message.pack() for message in sent)
    frames, arrived, number = Frames(), [], 0
    while data:
        cut = cuts[number % len(cuts)]
        arrived += frames.take(data[:cut])
        data, number = data[cut:], number + 1
    assert arrived == sent


@given(st.binary(max_size=300))
def test_random_bytes_are_messages_or_refused(data: bytes) -> None:
    try:
        for message in Frames().take(data):
            assert len(message.pack()) <= len(data)
    except ValueError as error:
        assert "malformed message" in str(error)


@pytest.mark.parametrize("length", [MOST_FRAME_BYTES + 1, 2**32 - 1])
def test_frames_too_long_are_refused_early(length: int) -> None:
    frame = bytearray(ControlMessage(kind=MessageKind.LEFT, origin=1).pack())
    frame[:4] = length.to_bytes(4, "little")
    with pytest.raises(ValueError, match=f"malformed message: {length} bytes"):
        list(Frames().take(bytes(frame)))


def test_more_receivers_than_bytes_are_refused() -> None:
    frame = ControlMessage(kind=MessageKind.LEFT, origin=1, to=(1, 2)).pack()
    frame = frame[:-12] + (3).to_bytes(4, "little") + frame[-8:]
    with pytest.raises(ValueError, match="to 3 ranks"):
        list(Frames().take(frame))


@given(ranks, st.text(max_size=3000))
def test_failures_survive_packing(fault: int, text: str) -> None:
    found, found_text = unpack_failure(pack_failure(fault, text))
    assert found == fault_of(fault)
    assert found in list(Fault)
    # A text that is too long is cut, possibly within a character.
    assert found_text == text or text.startswith(found_text.rstrip("\ufffd"))


@given(
    st.lists(
        st.tuples(ranks, st.binary(min_size=CALLED_BYTES, max_size=CALLED_BYTES)), max_size=2500
    )
)
def test_last_calls_survive_packing(called: list[tuple[int, bytes]]) -> None:
    bodies = pack_last_calls(called)
    assert bodies
    assert [one for body in bodies for one in unpack_last_calls(body)] == called
    assert all(len(body) < MOST_FRAME_BYTES for body in bodies)


@given(st.binary(max_size=100))
def test_random_bodies_are_read_or_refused(body: bytes) -> None:
    for read in (unpack_failure, unpack_last_calls, unpack_welcome):
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
def test_introductions_survive_packing(sent: Introduction) -> None:
    data = sent.pack(b"key")
    assert len(data) == INTRODUCTION_BYTES
    assert unpack(data, b"key") == sent
    with pytest.raises(AuthenticationError):
        unpack(data, b"kex")


def test_every_changed_bit_of_an_introduction_is_refused() -> None:
    data = Introduction(kind=ConnectionKind.P2P, rank=3, pid=812, tag=tag_of(b"a")).pack(b"key")
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AuthenticationError, match="changed in transit"):
            unpack(bytes(changed), b"key")


def test_an_invalid_introduction_is_refused() -> None:
    for streams in (0, 1, 1025):
        sent = Introduction(kind=ConnectionKind.P2P, rank=3, pid=1, stream=1, streams=streams)
        with pytest.raises(AuthenticationError, match="invalid introduction"):
            unpack(sent.pack(b"key"), b"key")
