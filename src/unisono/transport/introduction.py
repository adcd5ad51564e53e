"""The first thing that a dialer says once both ends are proved: who it is, and what it wants.

A message of fixed length under the session's key, so that nobody else can have said it and nothing
of it can be changed or cut off.
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
    """What a connection is for. The first two are known to the native core."""

    COLLECTIVES = 0
    MAIL = 1
    STAR = 2
    POST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """The dialer's rank in the world and its process; for which group it dials; which stream."""

    kind: ConnectionKind
    rank: int
    pid: int
    tag: bytes = NO_GROUP
    stream: int = 0
    streams: int = 1

    def pack(self, key: bytes) -> bytes:
        """As bytes, under the key of the session."""
        fields = _FIELDS.pack(self.kind, self.rank, self.pid, self.tag, self.stream, self.streams)
        return fields + _mac(key, fields)


def unpack(data: bytes, key: bytes) -> Introduction:
    """The introduction in `INTRODUCTION_BYTES` of data. Raises `AuthenticationError`.

    >>> said = Introduction(kind=ConnectionKind.MAIL, rank=3, pid=812, stream=1, streams=2)
    >>> unpack(said.pack(b"key"), b"key") == said
    True
    """
    fields, mac = data[: _FIELDS.size], data[_FIELDS.size :]
    if not hmac.compare_digest(mac, _mac(key, fields)):
        raise AuthenticationError("the dialer's introduction was changed on its way")
    kind, rank, pid, tag, stream, streams = _FIELDS.unpack(fields)
    if kind not in list(ConnectionKind) or not 0 <= stream < streams <= MOST_STREAMS:
        raise AuthenticationError(f"an introduction without sense: {kind=} {stream=} {streams=}")
    return Introduction(
        kind=ConnectionKind(kind), rank=rank, pid=pid, tag=tag, stream=stream, streams=streams
    )


def tag_of(group_id: bytes) -> bytes:
    """A group's id as it travels: 32 bytes, whatever the id is."""
    return sha256(b"unisono group\0" + group_id).digest()


def purpose_of(world: bytes, rank: int) -> bytes:
    """What a handshake with the porter of a rank is for."""
    return b"unisono link\0" + rank.to_bytes(4, "little") + world


def _mac(key: bytes, fields: bytes) -> bytes:
    return hmac.digest(key, b"introduction\0" + fields, "sha256")
