"""The journal of `unisono tune`, from which a run can be resumed. After a head line, the file has
one line per measured cell (an operation, a number of ranks and a size)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FORMAT = "unisono tune journal"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCell:
    """An operation, a number of ranks and a size, for which algorithms are measured."""

    op: str
    ranks: int
    nbytes: int


class Journal:
    """Measured cells with the median seconds of each algorithm. A line is written when a cell is
    complete.

    Raises `ValueError` for a journal of another machine. An incomplete last line is ignored.
    """

    def __init__(self, path: Path, machine: Mapping[str, object], *, resume: bool) -> None:
        self.path = path
        self.cells: dict[MeasuredCell, dict[str, float]] = {}
        head = {"format": _FORMAT, "version": _VERSION, "machine": dict(machine)}
        if resume and path.exists():
            self._read(head)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        lines = [head, *(_line(cell, times_s) for cell, times_s in self.cells.items())]
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
        partial.replace(path)

    def add(self, cell: MeasuredCell, times_s: Mapping[str, float]) -> None:
        """Records the times of a cell's algorithms."""
        self.cells[cell] = dict(times_s)
        with self.path.open("a") as file:
            file.write(json.dumps(_line(cell, times_s)) + "\n")

    def _read(self, head: dict[str, Any]) -> None:
        first, *rest = self.path.read_text().splitlines() or [""]
        if _parse(first) != head:
            raise ValueError(
                f"{self.path} is not a journal of this machine in its current state; run "
                "without --resume"
            )
        for number, line in enumerate(rest, start=2):
            found = _parse(line)
            try:
                cell = MeasuredCell(op=found["op"], ranks=found["ranks"], nbytes=found["nbytes"])
                self.cells[cell] = {str(k): float(v) for k, v in found["times_s"].items()}
            except (KeyError, TypeError, ValueError, AttributeError):
                if number <= len(rest):  # ignore an incomplete last line
                    raise ValueError(
                        f"{self.path}: expected a measurement in line {number}"
                    ) from None


def _line(cell: MeasuredCell, times_s: Mapping[str, float]) -> dict[str, Any]:
    named = {"op": cell.op, "ranks": cell.ranks, "nbytes": cell.nbytes}
    return {**named, "times_s": dict(times_s)}


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
