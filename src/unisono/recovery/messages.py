"""The messages by which ranks agree who goes on, and how they are written on the way.

Every message carries who is out, as far as its sender knows. What comes from the way is checked:
a text that is not such a message is refused, whatever is in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

MOST_PACKED_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """To the leader: here I am, and this ballot's group is formed here (0: none)."""

    out: frozenset[int]
    ready: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """From the leader: wait, I shall wait for others until then."""

    out: frozenset[int]
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOrder:
    """From the leader: form a group of these."""

    out: frozenset[int]
    ballot: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """From the leader: this ballot is decided, as the ledger says. Wakes who waits for that."""

    out: frozenset[int]
    ballot: int


Message: TypeAlias = StatusReport | Hold | FormOrder | Go

_KINDS: Final[dict[str, type[Message]]] = {
    kind.__name__.lower(): kind for kind in (StatusReport, Hold, FormOrder, Go)
}


def pack(message: Message) -> bytes:
    """The message for the way.

    >>> pack(Go(out=frozenset({1}), ballot=6))
    b'{"kind": "go", "out": [1], "ballot": 6}'
    """
    fields = {"kind": type(message).__name__.lower(), **asdict(message)}
    return json.dumps({**fields, "out": sorted(message.out)}).encode()


def unpack(packed: bytes, ranks: int) -> Message:
    """The message that `pack` packed, among `ranks` ranks. Raises `ValueError`.

    >>> unpack(pack(Go(out=frozenset({1}), ballot=6)), ranks=2)
    Go(out=frozenset({1}), ballot=6)
    """
    if len(packed) > MOST_PACKED_BYTES:
        raise ValueError(f"a message of {len(packed)} bytes")
    try:
        found = json.loads(packed)
        kind = _KINDS[found.pop("kind")]
        fields = {name: _checked(name, value, ranks) for name, value in found.items()}
        return kind(**fields)
    except (AttributeError, KeyError, TypeError, RecursionError, ValueError) as error:
        raise ValueError(f"not a message: {packed[:60]!r}: {error}") from error


def _checked(name: str, value: Any, ranks: int) -> Any:
    match name, value:
        case (("out" | "members"), [*found]) if all(_is_number(r, ranks) for r in found):
            distinct = frozenset(found)
            if len(distinct) == len(found):
                return distinct if name == "out" else tuple(found)
        case (("ballot" | "ready"), int()) if _is_number(value, 1 << 62):
            return value
        case "left_s", float() | int() if 0 <= value < 1e9:
            return float(value)
    raise ValueError(f"{name} of a message is {str(value)[:60]}")


def _is_number(value: Any, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end
