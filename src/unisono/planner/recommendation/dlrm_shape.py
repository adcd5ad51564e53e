"""The sizes of a recommendation model (DLRM), and its exact number of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

INTERACTIONS = ("dot", "cross")
"""Kinds of interaction. dot: dot products of all pairs of vectors (Naumov et al., 2019). cross: a
deep cross network with matrices of low rank (Wang et al., "DCN V2", 2021)."""
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


@dataclass(frozen=True, kw_only=True)
class Dlrm:
    """The sizes of a deep learning recommendation model. Raises `ValueError` for impossible sizes.

    >>> tables = (TableShape(rows=1000, ids=3), TableShape(rows=10))
    >>> shape = Dlrm(counters=2, width=4, tables=tables, bottom=(8,), top=(8,))
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
    interaction: str = "dot"
    """One of `INTERACTIONS`."""
    cross_layers: int = 0
    """Number of layers of the interaction "cross"."""
    cross_rank: int = 0
    """Rank of the matrices of the interaction "cross"."""

    def __post_init__(self) -> None:
        for name, size in [("counters", self.counters), ("width", self.width)]:
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        for name in ("bottom", "top"):
            widths = getattr(self, name)
            if any(size < 1 for size in widths):
                raise ValueError(f"{name}: expected widths of at least 1, got {widths}")
        if not self.tables:
            raise ValueError("tables: expected at least one, got none")
        if self.interaction not in INTERACTIONS:
            raise ValueError(
                f"interaction: expected {' or '.join(INTERACTIONS)}, got {self.interaction!r}"
            )
        for name in ("cross_layers", "cross_rank"):
            size = getattr(self, name)
            if (size > 0) != (self.interaction == "cross") or size < 0:
                expected = "at least 1" if self.interaction == "cross" else "0"
                raise ValueError(
                    f"{name}: expected {expected} for the interaction {self.interaction}, got "
                    f"{size}"
                )

    @property
    def columns(self) -> int:
        """Number of columns of the input: counters, then places for the ids of each table."""
        return self.counters + self.ids

    @cached_property
    def ids(self) -> int:
        """Largest number of ids of a sample in all tables together."""
        return sum(table.ids for table in self.tables)

    @property
    def vectors(self) -> int:
        """Number of vectors of a sample that interact: one of each table and the dense vector."""
        return len(self.tables) + 1

    @property
    def interactions(self) -> int:
        """Number of pairs among the embedding vectors and the dense vector."""
        return self.vectors * (self.vectors - 1) // 2

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        """Widths of the bottom layers, from the input to the output."""
        return (self.counters, *self.bottom, self.width)

    @property
    def top_widths(self) -> tuple[int, ...]:
        """Widths of the top layers, from the input to the output."""
        crossed = self.interaction == "cross"
        inputs = self.vectors * self.width if crossed else self.width + self.interactions
        return (inputs, *self.top, 1)

    @property
    def table_parameters(self) -> int:
        """Number of parameters of the embedding tables."""
        return sum(table.rows for table in self.tables) * self.width

    @property
    def dense_parameters(self) -> int:
        """Number of parameters outside the embedding tables."""
        inputs = self.vectors * self.width
        cross = self.cross_layers * (2 * inputs * self.cross_rank + inputs)
        return _dense(self.bottom_widths) + cross + _dense(self.top_widths)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.table_parameters + self.dense_parameters


def refuse_dlrm(model: object, what: str) -> None:
    """Raises ValueError for a recommendation model, which `what` does not predict."""
    if isinstance(model, Dlrm):
        raise ValueError(
            f"{what} is for transformers; predict, search and sensitivity accept planner.Dlrm"
        )


def _dense(widths: tuple[int, ...]) -> int:
    return sum((a + 1) * b for a, b in pairwise(widths))
