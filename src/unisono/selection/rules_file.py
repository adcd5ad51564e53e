"""A `Selection` as JSON text: versioned, with one rule on each line, for manual edits.

    {
      "format": "unisono selection",
      "version": 1,
      "rules": [
        {"op": "all_reduce", "nbytes": [0, 4096], "ranks": [2, 2], "algorithm": "one_shot"},
        {"op": "all_reduce", "algorithm": "ring:channels=2", "block_bytes": 65536}
      ],
      "measured": [
        {"op": "all_reduce", "ranks": 2, "nbytes": 8, "algorithm": "one_shot", "time_s": 6.2e-07}
      ]
    }

Keys are the fields of `Rule` and `Measured`. Fields with defaults are optional. A range is [least,
most], inclusive; null as `most` means no upper limit. The first matching rule decides. A call
without a matching rule is decided as if the file did not exist.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import UnsupportedError
from unisono.selection.rules import IntRange, Measured, Rule, Selection
from unisono.types import Op

T = TypeVar("T", Rule, Measured)

FORMAT = "unisono selection"
VERSION = 1


def to_json(selection: Selection, facts: Mapping[str, object] | None = None) -> str:
    """Returns a selection as JSON text. `facts` describe the measured machine, for human readers
    only.

    >>> from_json(to_json(Selection())) == Selection()
    True
    """
    head = {"format": FORMAT, "version": VERSION, **({"machine": dict(facts)} if facts else {})}
    parts = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, entries in (("rules", selection.rules), ("measured", selection.measured)):
        lines = ",\n".join(f"    {json.dumps(_to_dict(entry))}" for entry in entries)
        parts.append(f'  "{key}": [\n{lines}\n  ]' if lines else f'  "{key}": []')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def from_json(text: str, name: str = "selection") -> Selection:
    """Reads a selection from JSON text. Errors refer to the text by `name`.

    Raises `UnsupportedError` with the file, rule and field.

    >>> from_json('{"format": "unisono selection", "version": 1, "rules": [{"op": "all_reduce"}]}')
    Traceback (most recent call last):
    unisono.errors.UnsupportedError: selection: rule 1: algorithm is missing
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UnsupportedError(f"{name}: not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UnsupportedError(f'{name}: expected {{"format": "{FORMAT}", ...}}')
    if document.get("version") != VERSION:
        raise UnsupportedError(
            f"{name}: expected version {VERSION}, got {document.get('version')!r}"
        )
    known = {"format", "version", "machine", "rules", "measured"}
    if unknown := sorted(set(document) - known):
        raise UnsupportedError(f"{name}: unknown field {unknown[0]!r}; expected {sorted(known)}")
    return Selection(
        rules=_entries(Rule, document.get("rules", []), f"{name}: rule"),
        measured=_entries(Measured, document.get("measured", []), f"{name}: measured"),
    )


def load(path: str | os.PathLike[str]) -> Selection:
    """Reads a selection from a file. Raises `UnsupportedError` with the file, rule and field.

    >>> from tempfile import TemporaryDirectory
    >>> from pathlib import Path
    >>> with TemporaryDirectory() as folder:
    ...     save(Selection(rules=()), Path(folder) / "rules.json", {})
    ...     load(Path(folder) / "rules.json").rules
    ()
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedError(f"{os.fspath(path)}: cannot be read: {error}") from error
    return from_json(text, os.fspath(path))


def save(
    selection: Selection,
    path: str | os.PathLike[str],
    facts: Mapping[str, object] | None = None,
) -> None:
    """Writes a selection to a file atomically. Creates missing folders. Raises `OSError`.

    >>> from tempfile import TemporaryDirectory
    >>> from pathlib import Path
    >>> with TemporaryDirectory() as folder:
    ...     save(Selection(rules=()), Path(folder) / "new" / "rules.json", {})
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    partial.write_text(to_json(selection, facts), encoding="utf-8")
    partial.replace(target)


def _to_dict(entry: Rule | Measured) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields(entry):
        value = getattr(entry, field.name)
        if value != field.default:
            values[field.name] = [value.least, value.most] if isinstance(value, IntRange) else value
    return values


def _entries(kind: type[T], found: object, name: str) -> tuple[T, ...]:
    if not isinstance(found, list):
        raise UnsupportedError(f"{name}: expected a list, got {found!r}")
    return tuple(_entry(kind, one, f"{name} {number}") for number, one in enumerate(found, 1))


def _entry(kind: type[T], found: object, name: str) -> T:
    if not isinstance(found, dict):
        raise UnsupportedError(f"{name}: expected an object, got {found!r}")
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(set(found) - set(known)):
        raise UnsupportedError(f"{name}: unknown field {unknown[0]!r}; expected {list(known)}")
    for key, field in known.items():
        if key not in found and field.default is MISSING:
            raise UnsupportedError(f"{name}: {key} is missing")
    try:
        return kind(**{key: _read(key, str(known[key].type), found[key]) for key in found})
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None


def _read(key: str, kind: str, value: object) -> Any:
    """Converts a JSON value to the value of a field."""
    reader, expected = _READERS[kind]
    read = reader(value)
    if read is None and not (value is None and "None" in kind):
        raise UnsupportedError(f"{key}: expected {expected}, got {json.dumps(value)}")
    return read


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count(value: object) -> int | None:
    number = _integer(value)
    return number if number is not None and number >= 0 else None


def _seconds(value: object) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    return float(value) if good and isinstance(value, (int, float)) else None


def _span(value: object) -> IntRange | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    least, most = _count(value[0]), _count(value[1])
    if least is None or (most is None and value[1] is not None):
        return None
    return IntRange(least, most) if most is None or least <= most else None


_READERS: Mapping[str, tuple[Callable[[object], Any], str]] = {
    "Op": (lambda v: next((op for op in Op if op == v), None), f"one of {', '.join(Op)}"),
    "str": (lambda v: v if isinstance(v, str) else None, "a string"),
    "IntRange": (_span, "[least, most], with null for no upper limit"),
    "int": (_count, "a whole number"),
    "int | None": (_count, "a whole number or null"),
    "float": (_seconds, "a number of seconds above 0"),
}
"""Reader and description for each type of field, by its annotation."""
