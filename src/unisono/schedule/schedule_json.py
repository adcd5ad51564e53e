"""Writer and reader of schedules as JSON. Errors of the reader name the invalid field."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from unisono.errors import ScheduleError
from unisono.schedule.collective import Collective
from unisono.schedule.schedule import Schedule
from unisono.schedule.transfer import Transfer
from unisono.types import Op

FORMAT = "unisono-schedule"
VERSION = 1

Json: TypeAlias = Any
"""Any value that a JSON reader returns."""

_MAX_INT = (1 << 31) - 1


def to_json(schedule: Schedule) -> str:
    """Returns the schedule as JSON text. Fields of a transfer with default values are omitted.

    >>> from unisono.schedule import Builder
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "direct")
    >>> b.copy(0, 0, 1)
    >>> from_json(to_json(b.build())) == b.build()
    True
    """
    collective = schedule.collective
    head: dict[str, Json] = {
        "format": FORMAT,
        "version": VERSION,
        "algorithm": schedule.algorithm,
        "collective": {
            "op": collective.op.value,
            "ranks": collective.ranks,
            "parts": collective.parts,
        },
        "scratch": schedule.scratch,
    }
    if collective.root is not None:
        head["collective"]["root"] = collective.root
    lines = ",\n".join("  " + json.dumps(_encode(t)) for t in schedule.transfers)
    body = f"[\n{lines}\n ]" if lines else "[]"
    return f'{json.dumps(head, indent=1)[:-2]},\n "transfers": {body}\n}}\n'


def from_json(text: str) -> Schedule:
    """Reads a schedule from JSON text. Use `check` to prove the schedule correct.

    Raises `ScheduleError` with the invalid field if the text is not a schedule.

    >>> from unisono.schedule import Builder
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "direct")
    >>> b.copy(0, 0, 1)
    >>> from_json(to_json(b.build())) == b.build()
    True
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except (json.JSONDecodeError, RecursionError) as e:
        raise ScheduleError(f"not JSON: {e}") from e
    top = _object(
        data,
        "schedule",
        required={"format", "version", "algorithm", "collective", "transfers"},
        optional={"scratch"},
    )
    if top["format"] != FORMAT:
        raise ScheduleError(f"format: expected {FORMAT!r}, got {top['format']!r}")
    if _integer(top["version"], "version") != VERSION:
        raise ScheduleError(f"version: expected {VERSION}, got {top['version']}")
    if not isinstance(top["transfers"], list):
        raise ScheduleError(f"transfers: expected a list, got {_kind(top['transfers'])}")
    return Schedule(
        collective=_decode_collective(top["collective"]),
        algorithm=_string(top["algorithm"], "algorithm"),
        transfers=tuple(_decode(t, f"transfers[{i}]") for i, t in enumerate(top["transfers"])),
        scratch=_integer(top.get("scratch", 0), "scratch"),
    )


def _encode(t: Transfer) -> dict[str, Json]:
    fields: dict[str, Json] = {
        "round": t.round,
        "src": t.src,
        "src_chunk": t.src_chunk,
        "dst": t.dst,
        "dst_chunk": t.dst_chunk,
    }
    if t.count != 1:
        fields["count"] = t.count
    if t.reduce:
        fields["reduce"] = True
    if t.channel:
        fields["channel"] = t.channel
    return fields


def _decode(data: Json, where: str) -> Transfer:
    fields = _object(
        data,
        where,
        required={"round", "src", "src_chunk", "dst", "dst_chunk"},
        optional={"count", "reduce", "channel"},
    )
    reduce = fields.pop("reduce", False)
    if not isinstance(reduce, bool):
        raise ScheduleError(f"{where}.reduce: expected true or false, got {_kind(reduce)}")
    numbers = {name: _integer(value, f"{where}.{name}") for name, value in fields.items()}
    return Transfer(**numbers, reduce=reduce)


def _decode_collective(data: Json) -> Collective:
    where = "collective"
    fields = _object(data, where, required={"op", "ranks"}, optional={"parts", "root"})
    name = _string(fields["op"], f"{where}.op")
    if name not in list(Op):
        raise ScheduleError(f"{where}.op: expected one of {', '.join(Op)}, got {name!r}")
    root = fields.get("root")
    return Collective(
        op=Op(name),
        ranks=_integer(fields["ranks"], f"{where}.ranks"),
        parts=_integer(fields.get("parts", 1), f"{where}.parts"),
        root=None if root is None else _integer(root, f"{where}.root"),
    )


def _object(data: Json, where: str, *, required: set[str], optional: set[str]) -> dict[str, Json]:
    if not isinstance(data, dict):
        raise ScheduleError(f"{where}: expected an object, got {_kind(data)}")
    missing = sorted(required - data.keys())
    if missing:
        raise ScheduleError(f"{where}: missing {', '.join(missing)}")
    unknown = sorted(data.keys() - required - optional)
    if unknown:
        raise ScheduleError(f"{where}: unknown {', '.join(unknown)}")
    return dict(data)


def _integer(value: Json, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ScheduleError(f"{where}: expected an integer, got {_kind(value)}")
    if not 0 <= value <= _MAX_INT:
        raise ScheduleError(f"{where}: expected a number in 0..{_MAX_INT}, got {value}")
    return value


def _string(value: Json, where: str) -> str:
    if not isinstance(value, str):
        raise ScheduleError(f"{where}: expected a string, got {_kind(value)}")
    return value


def _kind(value: Json) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r:.40}"


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ScheduleError(f"{twice}: expected one value, got several")
    return fields
