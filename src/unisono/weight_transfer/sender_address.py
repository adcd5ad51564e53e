"""The address of a sender, as one text that a program passes to its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from unisono.transport import format_address

_SCHEME = "weights://"
KEY_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderAddress:
    """Host and port of a sender, and the key that its workers know."""

    host: str
    port: int
    key: bytes = field(repr=False)

    def text(self) -> str:
        """Returns the address as text.

        >>> SenderAddress(host="::1", port=4000, key=bytes(16)).text()
        'weights://[::1]:4000/00000000000000000000000000000000'
        """
        return f"{_SCHEME}{format_address((self.host, self.port))}/{self.key.hex()}"

    @classmethod
    def parse(cls, text: str) -> SenderAddress:
        """Reads what `text` wrote. Raises `ValueError` for any other text."""
        where, _, key = text.removeprefix(_SCHEME).partition("/")
        host, _, port = where.rpartition(":")
        if not (text.startswith(_SCHEME) and host and port.isdecimal() and _is_key(key)):
            raise ValueError(
                "address: expected the text of WeightSender.address, which begins with "
                f"{_SCHEME}host:port/, not {text[:40]!r}"
            )
        return cls(host=host.strip("[]"), port=int(port), key=bytes.fromhex(key))


def _is_key(text: str) -> bool:
    return len(text) == 2 * KEY_BYTES and all(each in "0123456789abcdef" for each in text)
