"""Messages between the ranks and rank 0 of a TCP bootstrap store, as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import AuthenticationError, RendezvousError

PURPOSE = b"meeting point"
"""Purpose that the handshake of these connections includes in its proofs."""
ADMITTED, ALL, REFUSED = b"A", b"T", b"R"
MOST_TEXT_BYTES = 1 << 20
"""Maximum length of one rank's text."""
MOST_FRAME_BYTES = 1 << 30
FRAME = struct.Struct("<cQ")
"""Header of a message of rank 0: kind, and length of the payload."""

_MAGIC = b"unimeet1"
_HELLO = struct.Struct("<8s16sIII")
HELLO_BYTES = _HELLO.size
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank's first message, with its identity and the length of its text."""

    job: bytes
    rank: int
    size: int
    text_bytes: int

    def pack(self) -> bytes:
        """Returns the 40 bytes of the message."""
        return _HELLO.pack(_MAGIC, self.job, self.rank, self.size, self.text_bytes)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Parses the message. Raises `AuthenticationError` if a rank would not have sent it."""
        magic, job, rank, size, text_bytes = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise AuthenticationError(
                "the client is not a unisono rank of this version, or has a job secret"
            )
        if text_bytes > MOST_TEXT_BYTES:
            raise AuthenticationError(
                f"the client announces a text of {text_bytes} bytes, at most {MOST_TEXT_BYTES}"
            )
        return cls(job=job, rank=rank, size=size, text_bytes=text_bytes)


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """Returns a message of rank 0: its kind, the length of the payload, and the payload."""
    return FRAME.pack(kind, len(payload)) + payload


def pack_texts(texts: Sequence[bytes]) -> bytes:
    """Packs several texts into one.

    >>> unpack_texts(pack_texts([b"a", b"", b"bc"]))
    [b'a', b'', b'bc']
    """
    lengths = struct.pack(f"<{len(texts) + 1}I", len(texts), *map(len, texts))
    return lengths + b"".join(texts)


def unpack_texts(data: bytes) -> list[bytes]:
    """Unpacks the texts. Raises `RendezvousError` if their lengths do not add up to the length of
    `data`.
    """
    count = _COUNT.unpack_from(data)[0] if len(data) >= _COUNT.size else -1
    start = _COUNT.size * (count + 1)
    if not 0 < start <= len(data):
        raise RendezvousError("rank 0 sent malformed texts: lengths do not fit")
    lengths = struct.unpack_from(f"<{count}I", data, _COUNT.size)
    if start + sum(lengths) != len(data):
        raise RendezvousError("rank 0 sent malformed texts: lengths do not fit")
    texts = []
    for length in lengths:
        texts.append(data[start : start + length])
        start += length
    return texts
