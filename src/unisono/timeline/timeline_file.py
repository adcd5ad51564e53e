"""The file of a timeline: layout in bytes, writer and reader.

The file has a head with sizes, two copies of the facts (rank, job, host, clock and so on), the
table of names, and the ring buffer of events. Facts are JSON with a checksum. The two copies are
written alternately, so one copy is always complete. The owner writes through a memory map. Any
process may read the file at any time, even after the owner was killed.
"""

from __future__ import annotations

import json
import struct
import threading
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.timeline.event_kinds import ENTRY, ENTRY_DTYPE

MAGIC: Final = b"UNISONOT"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sIIQQ")  # magic, version, bytes per event, events, bytes of names
_FACTS: Final = struct.Struct("<QII")  # generation (larger in the newer copy), length, checksum
_FACTS_BYTES: Final = 2000
_FACTS_AT: Final = (96, 96 + _FACTS_BYTES)
NAMES_AT: Final = 4096
NAMES_BYTES: Final = 1 << 18
ENTRIES_AT: Final = NAMES_AT + NAMES_BYTES
_LENGTH: Final = struct.Struct("<H")
_LONGEST_NAME: Final = 200
_KEPT_HEAD: Final = 60  # bytes that are kept from the beginning of a long name
_MOST_NAMES: Final = 65_535


def file_bytes(entries: int) -> int:
    """Returns the size in bytes of a file whose ring buffer has space for this number of events."""
    return ENTRIES_AT + entries * ENTRY.size


class FactsWriter:
    """Writes the facts of a timeline (rank, job, host, clock and so on). Readers always find a
    complete copy."""

    def __init__(self, memory: Any, entries: int) -> None:
        _HEAD.pack_into(memory, 0, MAGIC, _VERSION, ENTRY.size, entries, NAMES_BYTES)
        self._memory = memory
        self._generation = 0
        self._lock = threading.Lock()

    def write(self, facts: Mapping[str, Any]) -> None:
        """Replaces the facts. Raises `ValueError` if they are too long."""
        text = json.dumps(facts).encode()
        if len(text) > _FACTS_BYTES - _FACTS.size:
            raise ValueError(f"the facts of a timeline: {len(text)} bytes are too many")
        with self._lock:
            self._generation += 1
            at = _FACTS_AT[self._generation % 2]
            end = at + _FACTS.size
            self._memory[end : end + len(text)] = text
            _FACTS.pack_into(self._memory, at, self._generation, len(text), zlib.crc32(text))


class NameTable:
    """A table of names in a fixed number of bytes. New names for which the table has no space get
    the number 0.

    Names of more than 200 bytes are shortened in the middle.
    """

    def __init__(self, memory: Any) -> None:
        self.ids: dict[str, int] = {}
        """Number of each name in the table."""
        self._memory = memory
        self._at = NAMES_AT
        self._lock = threading.Lock()

    def add(self, name: str) -> int:
        """Returns the number of a name. Adds a new name if the table has space."""
        with self._lock:
            found = self.ids.get(name)
            if found is not None:
                return found
            text = _shortened(name)
            end = self._at + _LENGTH.size + len(text)
            if end + _LENGTH.size > ENTRIES_AT or len(self.ids) >= _MOST_NAMES:
                return 0
            self._memory[self._at + _LENGTH.size : end] = text
            _LENGTH.pack_into(self._memory, self._at, len(text))
            self._at = end
            number = self.ids[name] = len(self.ids) + 1
            return number


def _shortened(name: str) -> bytes:
    text = name.encode(errors="replace") or b"?"
    if len(text) <= _LONGEST_NAME:
        return text
    tail = text[_KEPT_HEAD + 3 - _LONGEST_NAME :]
    cut = text[:_KEPT_HEAD] + b"..." + tail
    return cut.decode(errors="ignore").encode()


# ---- reading


class FileContents:
    """Contents of a timeline's file. Raises `ValueError` for other bytes."""

    def __init__(self, content: bytes) -> None:
        if len(content) < NAMES_AT or content[: len(MAGIC)] != MAGIC:
            raise ValueError("expected a timeline or a dump of timelines; this is another file")
        _, version, entry_bytes, entries, names_bytes = _HEAD.unpack_from(content)
        if (version, entry_bytes, names_bytes) != (_VERSION, ENTRY.size, NAMES_BYTES):
            raise ValueError(
                f"expected a timeline of version {_VERSION}, found version {version}: read it with "
                "the version of unisono that wrote it"
            )
        if len(content) < file_bytes(entries):
            raise ValueError(
                f"expected {file_bytes(entries)} bytes, found {len(content)}: the file was cut off"
            )
        self.facts = _read_facts(content)
        self.names = _read_names(content)
        self.torn, self.entries = _read_entries(content, entries)


def _read_facts(content: bytes) -> dict[str, Any]:
    found: list[tuple[int, bytes]] = []
    for at in _FACTS_AT:
        generation, length, checksum = _FACTS.unpack_from(content, at)
        text = content[at + _FACTS.size : at + _FACTS.size + length]
        if generation and zlib.crc32(text) == checksum:
            found.append((generation, text))
    if not found:
        raise ValueError("the timeline's owner ended while it made the file: nothing is in it")
    facts = json.loads(max(found)[1])
    assert isinstance(facts, dict)
    return facts


def _read_names(content: bytes) -> tuple[str, ...]:
    names, at = [""], NAMES_AT
    while at + _LENGTH.size < ENTRIES_AT:
        (length,) = _LENGTH.unpack_from(content, at)
        if length == 0 or at + _LENGTH.size + length > ENTRIES_AT:
            break
        at += _LENGTH.size + length
        names.append(content[at - length : at].decode(errors="replace"))
    return tuple(names)


def _read_entries(content: bytes, entries: int) -> tuple[int, NDArray[np.void]]:
    """Returns the number of incomplete events, and the complete events in order."""
    ring = np.frombuffer(content, ENTRY_DTYPE, entries, ENTRIES_AT)
    whole = ring["sequence"] == ring["check"]
    used = ring["sequence"] > 0
    kept = ring[whole & used]
    torn = int(np.count_nonzero(used & ~whole))
    return torn, kept[np.argsort(kept["sequence"], kind="stable")]
