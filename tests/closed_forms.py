"""The tables of closed forms: which of their rows a test is about."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

TABLES = Path(__file__).parent / "simulator" / "tables"

_Test = TypeVar("_Test", bound=Callable[..., None])


def rows(table: Path) -> list[dict[str, str]]:
    """Of a CSV whose first lines, after #, name its sources."""
    lines = table.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


class Rows:
    """The rows of a table, each by what stands in the `columns` that name it."""

    def __init__(self, table: str, *columns: str) -> None:
        self.known = {tuple(row[column] for column in columns) for row in rows(TABLES / table)}
        self.tested: set[tuple[str, ...]] = set()

    def has(self, *names: str | tuple[str, ...]) -> Callable[[_Test], _Test]:
        """For a test: it is about these rows."""
        for name in names:
            row = (name,) if isinstance(name, str) else name
            assert row in self.known, f"no row {row}"
            self.tested.add(row)
        return lambda test: test
