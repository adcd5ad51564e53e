"""The sizes of a recommendation model. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

_MOST_IDS = 255  # a bag's length is sent as one byte


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShape:
    """The embedding table of one feature. Raises `ValueError` for impossible sizes."""

    rows: int
    """Number of different ids."""
    ids: int = 1
    """Largest number of ids of a sample; a bag may hold fewer or no ids."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows: expected at least 1, got {self.rows}")
        if not 1 <= self.ids <= _MOST_IDS:
            raise ValueError(f"ids: expected 1 to {_MOST_IDS}, got {self.ids}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DLRMShape:
    """The sizes of a `DLRM`. Raises `ValueError` for impossible sizes.

    >>> tables = (TableShape(rows=1000, ids=3), TableShape(rows=10))
    >>> shape = DLRMShape(counters=2, width=4, tables=tables, bottom=(8,), top=(8,))
    >>> shape.columns, shape.parameters
    (6, 4173)
    """

    counters: int
    """Number of dense features, which are integer counts."""
    width: int
    """Number of elements of an embedding vector, equal for all tables."""
    tables: tuple[TableShape, ...]
    """The table of each categorical feature."""
    bottom: tuple[int, ...]
    """Widths of the hidden layers between the dense features and the interaction."""
    top: tuple[int, ...]
    """Widths of the hidden layers between the interaction and the logit."""

    def __post_init__(self) -> None:
        for name, size in [("counters", self.counters), ("width", self.width)]:
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        if not self.tables:
            raise ValueError("tables: expected at least one, got none")

    @property
    def columns(self) -> int:
        """Number of columns of the input: counters, then places for the ids of each table."""
        return self.counters + sum(table.ids for table in self.tables)

    @property
    def interactions(self) -> int:
        """Number of pairs among the embedding vectors and the dense vector."""
        vectors = len(self.tables) + 1
        return vectors * (vectors - 1) // 2

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        """Widths of the bottom layers, from the input to the output."""
        return (self.counters, *self.bottom, self.width)

    @property
    def top_widths(self) -> tuple[int, ...]:
        """Widths of the top layers, from the input to the output."""
        return (self.width + self.interactions, *self.top, 1)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        rows = sum(table.rows for table in self.tables)
        return rows * self.width + _dense(self.bottom_widths) + _dense(self.top_widths)


def _dense(widths: tuple[int, ...]) -> int:
    return sum((a + 1) * b for a, b in pairwise(widths))
