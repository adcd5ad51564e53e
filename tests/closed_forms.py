"""Tables of closed forms, and a record of the rows that the tests cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tables import SIMULATOR, rows

_Test = TypeVar("_Test", bound=Callable[..., None])


class Rows:
    """Rows of a table, each named by its values in `columns`."""

    def __init__(self, table: str, *columns: str) -> None:
        self.known = {tuple(row[column] for column in columns) for row in rows(SIMULATOR / table)}
        self.tested: set[tuple[str, ...]] = set()

    def has(self, *names: str | tuple[str, ...]) -> Callable[[_Test], _Test]:
        """Returns a decorator for the test of these rows. Records that the rows are tested."""
        for name in names:
            row = (name,) if isinstance(name, str) else name
            assert row in self.known, f"no row {row}"
            self.tested.add(row)
        return lambda test: test
