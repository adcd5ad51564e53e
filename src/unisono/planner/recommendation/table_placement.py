"""The ranks that hold the parts of each embedding table. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from unisono.division import part_of
from unisono.planner.recommendation.dlrm import TableShape

TableKind = Literal["table", "row", "column", "replicated"]
TABLE_KINDS: tuple[TableKind, ...] = get_args(TableKind)
"""Kinds of placement: whole on one rank, rows divided, columns divided, whole on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePiece:
    """The part of a table that one rank holds."""

    table: int
    """Number of the table."""
    start: tuple[int, int]
    """First row and first column of the part."""
    sizes: tuple[int, int]
    """Number of rows and of columns."""
    is_summed: bool
    """True if other ranks hold other rows, so that a bag's result is a sum over the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTable:
    """A table, the kind of its placement, and the ranks that hold its parts, in order."""

    shape: TableShape
    kind: TableKind
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """The ranks of all tables. Raises `ValueError` if a table's ranks do not suit its kind.

    As in torch, parts have ceil(length / parts) rows or columns, and the last parts fewer.

    >>> halves = PlacedTable(shape=TableShape(rows=9), kind="column", ranks=(2, 0))
    >>> placement = TablePlacement(tables=(halves,), width=5, ranks=3)
    >>> [(piece.start, piece.sizes) for piece in placement.pieces(0)]
    [((0, 3), (9, 2))]
    >>> placement.memory_bytes(item_bytes=4)
    (72, 0, 108)
    """

    tables: tuple[PlacedTable, ...]
    width: int
    """Number of columns of every table."""
    ranks: int

    def __post_init__(self) -> None:
        for number, table in enumerate(self.tables):
            _check(number, table, width=self.width, ranks=self.ranks)

    def pieces(self, rank: int) -> tuple[TablePiece, ...]:
        """Returns the parts of divided tables that a rank holds, in the order of the tables."""
        return self._pieces[rank]

    @cached_property
    def _pieces(self) -> tuple[tuple[TablePiece, ...], ...]:
        found: list[list[TablePiece]] = [[] for _ in range(self.ranks)]
        for number, table in enumerate(self.tables):
            if table.kind != "replicated":
                for part, rank in enumerate(table.ranks):
                    found[rank].append(self._piece(number, table, part))
        return tuple(tuple(pieces) for pieces in found)

    def _piece(self, number: int, table: PlacedTable, part: int) -> TablePiece:
        start, sizes = [0, 0], [table.shape.rows, self.width]
        if table.kind != "table":
            dim = 0 if table.kind == "row" else 1
            start[dim], sizes[dim] = part_of(sizes[dim], part, len(table.ranks))
        return TablePiece(
            table=number,
            start=(start[0], start[1]),
            sizes=(sizes[0], sizes[1]),
            is_summed=table.kind == "row",
        )

    @property
    def is_divided(self) -> bool:
        """True if at least one table is not replicated."""
        return any(table.kind != "replicated" for table in self.tables)

    @property
    def replicated_rows(self) -> int:
        """Number of rows of all replicated tables."""
        return sum(table.shape.rows for table in self.tables if table.kind == "replicated")

    def memory_bytes(self, *, item_bytes: int) -> tuple[int, ...]:
        """Returns the bytes of the tables' weights on each rank."""
        whole = self.replicated_rows * self.width
        parts = [sum(p.sizes[0] * p.sizes[1] for p in self.pieces(r)) for r in range(self.ranks)]
        return tuple((whole + part) * item_bytes for part in parts)


def column_parts(width: int, parts: int) -> int:
    """Returns how many of `parts` ranks get columns if they split `width` columns.

    Parts have ceil(width / parts) columns, so the last ranks may get none.

    >>> column_parts(16, 5)
    4
    """
    return -(-width // -(-width // parts))


def _check(number: int, table: PlacedTable, *, width: int, ranks: int) -> None:
    kind, held = table.kind, table.ranks
    if kind not in TABLE_KINDS:
        raise ValueError(f"table {number}: expected one of {', '.join(TABLE_KINDS)}, got {kind!r}")
    if len(set(held)) < len(held) or not set(held) <= set(range(ranks)):
        raise ValueError(f"table {number}: expected distinct ranks below {ranks}, got {held}")
    if kind == "table" and len(held) != 1:
        raise ValueError(f"table {number}: expected one rank for the kind table, got {held}")
    if kind in ("row", "replicated") and held != tuple(range(ranks)):
        raise ValueError(f"table {number}: expected all {ranks} ranks for {kind}, got {held}")
    if kind == "column" and (not held or column_parts(width, len(held)) != len(held)):
        raise ValueError(
            f"table {number}: {len(held)} ranks cannot divide {width} columns; "
            f"{column_parts(width, max(len(held), 1))} can"
        )
