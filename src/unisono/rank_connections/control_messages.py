"""Control messages between ranks, as frames of bounded length.

A frame consists of a head, the ranks to which it is addressed, and a body whose form depends on the
kind. The head holds the length of the rest, the kind, the group, the origin, and the number of
addressed ranks. Only authenticated connections deliver frames, but every number is checked before
use.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from unisono.rank_connections.group_endpoint import Fault, fault_of
from unisono.transport import NO_GROUP, TAG_BYTES

# bytes that follow the head, kind, origin, tag of the group, number of addressed ranks
_HEAD = struct.Struct(f"<IB3xI{TAG_BYTES}sI")
_FAULT = struct.Struct("<I")
CALLED_BYTES = 48
_ENTRY = struct.Struct(f"<I{CALLED_BYTES}s")
_PID = struct.Struct("<I")
MOST_FRAME_BYTES = 1 << 20
MOST_TEXT_BYTES = 4096
_MOST_ENTRIES = 1024


class MessageKind(IntEnum):
    """The kinds of message."""

    WELCOME = 1  # from the server to a connected rank: the server's process id and data
    LEFT = 2  # a rank closed a group without a failure
    FAILED = 3  # a group has failed on a rank; body: fault and error text
    LAST_CALL_QUERY = 4  # asks for each rank's most recent call; body: the sender's own
    LAST_CALLS = 5  # the most recent calls of some ranks
    LOST = 6  # a rank is lost; body: error text
    BYE = 7  # a rank leaves the control group without a failure
    RECOVERY_TEXT = 8  # message of the recovery agreement between ranks that shrink a group
    VOTE_REQUEST = 9  # request for the vote of a host on the group that replaces a failed group
    VOTE_REPLY = 10  # answer to a vote request


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlMessage:
    """A control message. `origin` is the world rank that sends the message or that the message is
    about. `to` are the receiving world ranks.
    """

    kind: MessageKind
    origin: int
    tag: bytes = NO_GROUP
    to: tuple[int, ...] = ()
    body: bytes = b""

    def pack(self) -> bytes:
        """Returns the frame.

        >>> frames = Frames()
        >>> message = ControlMessage(kind=MessageKind.LEFT, origin=3, to=(0, 1))
        >>> list(frames.take(message.pack())) == [message]
        True
        """
        to = struct.pack(f"<{len(self.to)}I", *self.to)
        length = len(to) + len(self.body)
        return _HEAD.pack(length, self.kind, self.origin, self.tag, len(self.to)) + to + self.body


class Frames:
    """Splits the bytes of a connection into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, data: bytes) -> Iterator[ControlMessage]:
        """Adds the received bytes `data`, and yields the messages that are then complete. Raises
        `ValueError` for a malformed frame.
        """
        self._data += data
        while len(self._data) >= _HEAD.size:
            length, kind, origin, tag, count = _HEAD.unpack_from(self._data)
            if length > MOST_FRAME_BYTES or count * 4 > length or kind not in list(MessageKind):
                raise ValueError(
                    f"malformed message: {length} bytes of kind {kind} to {count} ranks"
                )
            end = _HEAD.size + length
            if len(self._data) < end:
                return
            to = struct.unpack_from(f"<{count}I", self._data, _HEAD.size)
            body = bytes(self._data[_HEAD.size + 4 * count : end])
            del self._data[:end]
            yield ControlMessage(kind=MessageKind(kind), origin=origin, tag=tag, to=to, body=body)


# ---- bodies


def pack_failure(fault: int, text: str) -> bytes:
    """Packs a failure; a text that is too long is cut."""
    return _FAULT.pack(fault) + text.encode()[:MOST_TEXT_BYTES]


def unpack_failure(body: bytes) -> tuple[Fault, str]:
    """Returns fault and text. Raises `ValueError`.

    >>> unpack_failure(pack_failure(1, "rank 3 is gone"))
    (<Fault.PEER_LOST: 1>, 'rank 3 is gone')
    """
    if not _FAULT.size <= len(body) <= _FAULT.size + MOST_TEXT_BYTES:
        raise ValueError(f"a failure of {len(body)} bytes: expected a fault and a short text")
    (number,) = _FAULT.unpack_from(body)
    return fault_of(number), body[_FAULT.size :].decode(errors="replace")


def pack_last_calls(called: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """Packs the most recent calls of ranks into message bodies: as many as needed, at least one."""
    entries = [_ENTRY.pack(rank, last) for rank, last in called]
    starts = range(0, max(len(entries), 1), _MOST_ENTRIES)
    return [b"".join(entries[start : start + _MOST_ENTRIES]) for start in starts]


def unpack_last_calls(body: bytes) -> list[tuple[int, bytes]]:
    """Returns pairs of a world rank and its most recent call. Raises `ValueError`.

    >>> (body,) = pack_last_calls([(3, bytes(CALLED_BYTES))])
    >>> unpack_last_calls(body) == [(3, bytes(CALLED_BYTES))]
    True
    """
    if len(body) % _ENTRY.size:
        raise ValueError(f"last calls of {len(body)} bytes: expected {_ENTRY.size} per call")
    return [(rank, called) for rank, called in _ENTRY.iter_unpack(body)]


def pack_welcome(pid: int, rank0_data: bytes) -> bytes:
    """Packs the server's process id and its data for the other ranks."""
    return _PID.pack(pid) + rank0_data


def unpack_welcome(body: bytes) -> tuple[int, bytes]:
    """Returns the server's process id and its data. Raises `ValueError`.

    >>> unpack_welcome(pack_welcome(812, b"data"))
    (812, b'data')
    """
    if len(body) < _PID.size:
        raise ValueError(f"a welcome of {len(body)} bytes: expected at least {_PID.size}")
    return _PID.unpack_from(body)[0], body[_PID.size :]
