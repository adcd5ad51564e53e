"""The dialer's message after authentication: its identity and the purpose of the connection.

The message has a fixed length and a MAC under the session key. So no other process can have sent
the message, and a changed or truncated message is detected.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256

from unisono.errors import AuthenticationError

_FIELDS = struct.Struct("<B3xII32sHH")
_MAC_BYTES = 32
INTRODUCTION_BYTES = _FIELDS.size + _MAC_BYTES
TAG_BYTES = 32
NO_GROUP = bytes(TAG_BYTES)
MOST_STREAMS = 1024


class ConnectionKind(IntEnum):
    """Purpose of a connection. The native core uses only the first two."""

    COLLECTIVES = 0
    P2P = 1
    CONTROL = 2
    PEER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """The dialer's world rank and process, and the group and stream of the connection."""

    kind: ConnectionKind
    rank: int
    pid: int
    tag: bytes = NO_GROUP
    stream: int = 0
    streams: int = 1

    def pack(self, key: bytes) -> bytes:
        """Packs the introduction, with a MAC under the session key."""
        fields = _FIELDS.pack(self.kind, self.rank, self.pid, self.tag, self.stream, self.streams)
        return fields + _mac(key, fields)


def unpack(data: bytes, key: bytes) -> Introduction:
    """Unpacks `INTRODUCTION_BYTES` bytes. Raises `AuthenticationError`.

    >>> introduction = Introduction(kind=ConnectionKind.P2P, rank=3, pid=812, stream=1, streams=2)
    >>> unpack(introduction.pack(b"key"), b"key") == introduction
    True
    """
    fields, mac = data[: _FIELDS.size], data[_FIELDS.size :]
    if not hmac.compare_digest(mac, _mac(key, fields)):
        raise AuthenticationError("the dialer's introduction was changed in transit")
    kind, rank, pid, tag, stream, streams = _FIELDS.unpack(fields)
    if kind not in list(ConnectionKind) or not 0 <= stream < streams <= MOST_STREAMS:
        raise AuthenticationError(f"invalid introduction: {kind=} {stream=} {streams=}")
    return Introduction(
        kind=ConnectionKind(kind), rank=rank, pid=pid, tag=tag, stream=stream, streams=streams
    )


def tag_of(group_id: bytes) -> bytes:
    """Returns the 32-byte tag by which messages identify a group."""
    return sha256(b"unisono group\0" + group_id).digest()


def purpose_of(world: bytes, rank: int) -> bytes:
    """Returns the purpose of a handshake with a rank's connection manager."""
    return b"unisono link\0" + rank.to_bytes(4, "little") + world


def _mac(key: bytes, fields: bytes) -> bytes:
    return hmac.digest(key, b"introduction\0" + fields, "sha256")
