"""Messages of the recovery agreement, and their encoding.

Every message contains the ranks that are out, as far as its sender knows. A received text is
checked: an invalid message is refused, whatever it contains.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

MOST_PACKED_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """Report to the leader that the sender takes part. `ready` is the ballot whose group the sender
    has formed (0: none)."""

    out: frozenset[int]
    ready: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The leader's request to wait. The leader itself waits at most `left_s` seconds for other
    ranks.
    """

    out: frozenset[int]
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOrder:
    """Order of the leader to form a group of these members."""

    out: frozenset[int]
    ballot: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Notice of the leader that the ledger records a decision for this ballot. Wakes ranks that
    wait for the decision."""

    out: frozenset[int]
    ballot: int


Message: TypeAlias = StatusReport | Hold | FormOrder | Go

_KINDS: Final[dict[str, type[Message]]] = {
    kind.__name__.lower(): kind for kind in (StatusReport, Hold, FormOrder, Go)
}


def pack(message: Message) -> bytes:
    """Encodes a message.

    >>> pack(Go(out=frozenset({1}), ballot=6))
    b'{"kind": "go", "out": [1], "ballot": 6}'
    """
    fields = {"kind": type(message).__name__.lower(), **asdict(message)}
    return json.dumps({**fields, "out": sorted(message.out)}).encode()


def unpack(packed: bytes, ranks: int) -> Message:
    """Decodes a message among `ranks` ranks. Raises `ValueError`.

    >>> unpack(pack(Go(out=frozenset({1}), ballot=6)), ranks=2)
    Go(out=frozenset({1}), ballot=6)
    """
    if len(packed) > MOST_PACKED_BYTES:
        raise ValueError(f"a message of {len(packed)} bytes: at most {MOST_PACKED_BYTES}")
    try:
        found = json.loads(packed)
        kind = _KINDS[found.pop("kind")]
        fields = {name: _checked(name, value, ranks) for name, value in found.items()}
        return kind(**fields)
    except (AttributeError, KeyError, TypeError, RecursionError, ValueError) as error:
        raise ValueError(f"not a recovery message: {packed[:60]!r}: {error}") from error


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
    raise ValueError(f"invalid {name} in a message: {str(value)[:60]}")


def _is_number(value: Any, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end
