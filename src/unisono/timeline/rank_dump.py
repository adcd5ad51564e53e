"""Dumps (the contents of ranks' timelines at one time), and files of dumps."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.timeline.clock_offset import ClockReading
from unisono.timeline.timeline_file import FileContents

_SUFFIX = ".timeline"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankDump:
    """The last events of one rank, oldest first."""

    rank: int
    size: int
    job: str
    pid: int
    host: str
    clock: str
    """The name of the rank's clock; ranks with the same clock have the same name."""
    wall_ns: int
    now_ns: int
    """Time of the rank's clock at the Unix time `wall_ns`."""
    readings: tuple[ClockReading, ...]
    failure: str
    """The error that ended the rank's controller, or an empty text."""
    names: tuple[str, ...]
    events: NDArray[np.void]
    lost: int
    """Number of older events that the ring buffer has overwritten."""
    torn: int
    """Number of events that are incomplete, because the rank was writing them."""

    @staticmethod
    def parse(content: bytes) -> RankDump:
        """Returns the dump from the bytes of a timeline's file. Raises `ValueError` for other
        bytes."""
        found = FileContents(content)
        facts: dict[str, Any] = dict(found.facts)
        readings = tuple(ClockReading(**each) for each in facts.pop("readings", ()))
        kept = found.entries
        first = int(kept["sequence"][0]) if len(kept) else 1
        return RankDump(
            **{"failure": "", **facts},
            readings=readings,
            names=found.names,
            events=kept,
            lost=first - 1,
            torn=found.torn,
        )

    def name_of(self, event: Any) -> str:
        """Returns the name of an event, such as a tensor's name, or a note if the name table was
        full."""
        return self.names[event["name"]] or "(name table full)"


def save_dumps(path: Path, contents: Sequence[bytes]) -> None:
    """Writes several timelines into one file. Each element of `contents` is the content of a
    timeline's file. Raises `ValueError` for contents that are not a timeline.

    >>> save_dumps(Path("/dev/null"), [b"something else"])
    Traceback (most recent call last):
    ValueError: expected a timeline or a dump of timelines; this is another file
    """
    dumps = [RankDump.parse(content) for content in contents]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for index, (dump, content) in enumerate(zip(dumps, contents, strict=True)):
            name = f"{index:05d}-rank-{dump.rank}-process-{dump.pid}{_SUFFIX}"
            archive.writestr(name, content)


def load_contents(path: Path) -> list[bytes]:
    """Returns the contents of the timelines in a file. A file of `save_dumps` has several
    timelines, a timeline's file has one.

    Raises `ValueError` with the path for files that cannot be read.

    >>> from unisono.timeline import TimelineWriter
    >>> timeline = TimelineWriter(rank=0, size=1, events=64)
    >>> len(load_contents(timeline.path))
    1
    """
    try:
        if not zipfile.is_zipfile(path):
            return [path.read_bytes()]
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(_SUFFIX)]
            return [archive.read(name) for name in names]
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def load_dumps(paths: Sequence[Path]) -> list[RankDump]:
    """Returns the dumps of all ranks in these files. Raises `ValueError` with the path of an
    invalid file.

    >>> from unisono.timeline import TimelineWriter
    >>> timeline = TimelineWriter(rank=3, size=4, events=64)
    >>> [dump.rank for dump in load_dumps([timeline.path])]
    [3]
    """
    found: list[RankDump] = []
    for path in paths:
        try:
            found += [RankDump.parse(content) for content in load_contents(path)]
        except ValueError as error:
            named = str(error).startswith(str(path))
            raise ValueError(str(error) if named else f"{path}: {error}") from error
    return found
