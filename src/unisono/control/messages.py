"""What ranks tell each other over the star and by post: frames of a bounded length, as data.

A frame is a head (length of what follows, kind, group, who says it, to how many), the ranks that it
is for, and a body whose form depends on the kind. Only connections that proved themselves get here,
yet no number is used before it is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from unisono.control.group_endpoint import Fault, fault_of
from unisono.transport import NO_GROUP, TAG_BYTES

_HEAD = struct.Struct(f"<IB3xI{TAG_BYTES}sI")  # bytes that follow the head, kind, origin, tag, to
_FAULT = struct.Struct("<I")
CALLED_BYTES = 48
_ENTRY = struct.Struct(f"<I{CALLED_BYTES}s")
_PID = struct.Struct("<I")
MOST_FRAME_BYTES = 1 << 20
MOST_TEXT_BYTES = 4096
_MOST_ENTRIES = 1024


class MessageKind(IntEnum):
    """The kinds of message."""

    WELCOME = 1  # the middle to a rank that has just connected: its process, and its word
    LEFT = 2  # a rank closed a group in good order
    FAILED = 3  # a group failed at a rank: fault and text
    LOOK = 4  # what did everybody call last? With the asker's own last call
    LOOKED = 5  # what some ranks called last
    GONE = 6  # a rank is lost, and how
    BYE = 7  # a rank leaves the star in good order
    POST = 8  # to a rank that shrinks a group: a text of another
    ASK = 9  # to a rank's vote on what succeeds a group
    ANSWER = 10  # of that vote


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlMessage:
    """`origin`: the world rank that says it, or that it is about. `to`: world ranks."""

    say: MessageKind
    origin: int
    tag: bytes = NO_GROUP
    to: tuple[int, ...] = ()
    body: bytes = b""

    def pack(self) -> bytes:
        """The frame.

        >>> frames = Frames()
        >>> said = ControlMessage(say=MessageKind.LEFT, origin=3, to=(0, 1))
        >>> list(frames.take(said.pack())) == [said]
        True
        """
        to = struct.pack(f"<{len(self.to)}I", *self.to)
        length = len(to) + len(self.body)
        return _HEAD.pack(length, self.say, self.origin, self.tag, len(self.to)) + to + self.body


class Frames:
    """Takes bytes as they come from a connection, and gives the messages that are complete."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, data: bytes) -> Iterator[ControlMessage]:
        """The messages that `data` completes. Raises `ValueError` for what is none."""
        self._data += data
        while len(self._data) >= _HEAD.size:
            length, say, origin, tag, count = _HEAD.unpack_from(self._data)
            if length > MOST_FRAME_BYTES or count * 4 > length or say not in list(MessageKind):
                raise ValueError(f"no message: {length} bytes of kind {say} to {count} ranks")
            end = _HEAD.size + length
            if len(self._data) < end:
                return
            to = struct.unpack_from(f"<{count}I", self._data, _HEAD.size)
            body = bytes(self._data[_HEAD.size + 4 * count : end])
            del self._data[:end]
            yield ControlMessage(say=MessageKind(say), origin=origin, tag=tag, to=to, body=body)


# ---- bodies


def failed_body(fault: int, text: str) -> bytes:
    """A failure; a text that is too long loses its end."""
    return _FAULT.pack(fault) + text.encode()[:MOST_TEXT_BYTES]


def read_failed(body: bytes) -> tuple[Fault, str]:
    """Fault and text. Raises `ValueError`.

    >>> read_failed(failed_body(1, "rank 3 is gone"))
    (<Fault.PEER_LOST: 1>, 'rank 3 is gone')
    """
    if not _FAULT.size <= len(body) <= _FAULT.size + MOST_TEXT_BYTES:
        raise ValueError(f"a failure of {len(body)} bytes")
    (number,) = _FAULT.unpack_from(body)
    return fault_of(number), body[_FAULT.size :].decode(errors="replace")


def looked_bodies(called: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """What ranks called, in as many bodies as needed; at least one."""
    entries = [_ENTRY.pack(rank, last) for rank, last in called]
    starts = range(0, max(len(entries), 1), _MOST_ENTRIES)
    return [b"".join(entries[start : start + _MOST_ENTRIES]) for start in starts]


def read_looked(body: bytes) -> list[tuple[int, bytes]]:
    """What ranks called, by world rank. Raises `ValueError`.

    >>> (body,) = looked_bodies([(3, bytes(CALLED_BYTES))])
    >>> read_looked(body) == [(3, bytes(CALLED_BYTES))]
    True
    """
    if len(body) % _ENTRY.size:
        raise ValueError(f"calls of ranks in {len(body)} bytes")
    return [(rank, called) for rank, called in _ENTRY.iter_unpack(body)]


def welcome_body(pid: int, word: bytes) -> bytes:
    """The middle's process, and what it has to tell."""
    return _PID.pack(pid) + word


def read_welcome(body: bytes) -> tuple[int, bytes]:
    """The number of the process, and the word. Raises `ValueError`.

    >>> read_welcome(welcome_body(812, b"word"))
    (812, b'word')
    """
    if len(body) < _PID.size:
        raise ValueError(f"a welcome of {len(body)} bytes")
    return _PID.unpack_from(body)[0], body[_PID.size :]
