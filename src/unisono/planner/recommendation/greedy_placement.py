"""The choice of each embedding table's kind (by fewest bytes sent) and ranks (by least load)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.planner.recommendation.dlrm import TableShape
from unisono.planner.recommendation.exchange_traffic import all_bytes, rank_loads
from unisono.planner.recommendation.table_placement import (
    TABLE_KINDS,
    PlacedTable,
    TableKind,
    TablePlacement,
    column_parts,
)

AUTO = "auto"


def place_tables(
    tables: Sequence[TableShape],
    *,
    width: int,
    ranks: int,
    samples: int,
    kind: str = AUTO,
    item_bytes: int = 4,
    capacity_bytes: int | None = None,
) -> TablePlacement:
    """Chooses the ranks of each table.

    `samples`: number of samples of a step on all ranks together. `kind`: one of `TABLE_KINDS` for
    all tables, or "auto" for the kind that sends the fewest bytes; then a table that is larger than
    an even share of all divided tables is on several ranks. `capacity_bytes`: largest number of
    bytes of tables on a rank; None: no limit.

    The tables are placed one by one, in decreasing order of load. Each part is placed on the rank
    with the least load (Graham, "Bounds on multiprocessing timing anomalies", 1969). So without a
    capacity the loads of two ranks differ by at most the load of one part.

    Raises `ValueError` if the capacity is too small, and for an unknown kind.

    >>> tables = [TableShape(rows=10), TableShape(rows=3000), TableShape(rows=2000)]
    >>> placement = place_tables(tables, width=8, ranks=2, samples=64)
    >>> [(table.kind, table.ranks) for table in placement.tables]
    [('replicated', (0, 1)), ('column', (0, 1)), ('table', (0,))]
    """
    if kind not in (AUTO, *TABLE_KINDS):
        raise ValueError(f"kind: expected auto or one of {', '.join(TABLE_KINDS)}, got {kind!r}")
    greedy = _Greedy(
        width=width,
        ranks=ranks,
        samples=samples,
        item_bytes=item_bytes,
        capacity_bytes=capacity_bytes,
    )
    return greedy.place(tables, [each for each in TABLE_KINDS if kind in (AUTO, each)])


class _Greedy:
    """The placement in progress: each rank's load and memory with the tables placed so far."""

    def __init__(
        self,
        *,
        width: int,
        ranks: int,
        samples: int,
        item_bytes: int,
        capacity_bytes: int | None,
    ) -> None:
        self._width, self._ranks, self._samples = width, ranks, samples
        self._item_bytes, self._capacity = item_bytes, capacity_bytes
        self._loads = [0.0] * ranks
        self._memory = [0] * ranks

    def place(self, tables: Sequence[TableShape], kinds: Sequence[TableKind]) -> TablePlacement:
        limit = self._largest_part(tables, kinds)
        # Decreasing order of the load of the whole table; tables of equal load keep their order.
        order = sorted(range(len(tables)), key=lambda number: -self._load_whole(tables[number]))
        placed: dict[int, PlacedTable] = {}
        for number in order:
            placed[number] = self._placed(number, self._options(tables[number], kinds, limit))
            self._add(placed[number])
        return self._placement(*(placed[number] for number in range(len(tables))))

    def _placed(self, number: int, options: Sequence[PlacedTable]) -> PlacedTable:
        """Returns the first option for which enough ranks have memory, with the chosen ranks."""
        for option in options:
            held = self._free(option)
            if held is not None:
                return PlacedTable(shape=option.shape, kind=option.kind, ranks=held)
        least = min(self._part_bytes(option) for option in options)
        raise ValueError(
            f"table {number}: {options[0].shape.rows} rows of {self._width} elements need {least} "
            f"bytes on a rank that already holds {min(self._memory)}, but capacity_bytes is "
            f"{self._capacity}; expected at least {min(self._memory) + least}"
        )

    def _free(self, option: PlacedTable) -> tuple[int, ...] | None:
        """Returns ranks for an option, the least loaded first; None if too few have the memory."""
        needed, parts = self._part_bytes(option), len(option.ranks)
        free = [
            rank
            for rank in range(self._ranks)
            if self._capacity is None or self._memory[rank] + needed <= self._capacity
        ]
        if len(free) < parts:
            return None
        if option.kind in ("row", "replicated"):
            return option.ranks
        return tuple(sorted(free, key=lambda rank: (self._loads[rank], self._memory[rank]))[:parts])

    def _add(self, table: PlacedTable) -> None:
        alone = self._placement(table)
        for rank, held in enumerate(alone.memory_bytes(item_bytes=self._item_bytes)):
            self._memory[rank] += held
            self._loads[rank] += self._rank_loads(alone)[rank]

    def _options(
        self, shape: TableShape, kinds: Sequence[TableKind], limit: int
    ) -> list[PlacedTable]:
        """Returns the options for a table, the fewest bytes first, with placeholder ranks.

        A whole table that exceeds the limit comes last.
        """
        parts = {"table": 1, "row": self._ranks, "replicated": self._ranks}
        parts["column"] = self._column_parts(shape, limit, is_only=list(kinds) == ["column"])
        found = [
            PlacedTable(shape=shape, kind=kind, ranks=tuple(range(parts[kind])))
            for kind in kinds
            if parts[kind]
        ]

        def order(option: PlacedTable) -> tuple[bool, float]:
            is_too_large = option.kind == "table" and self._part_bytes(option) > limit
            return is_too_large, self._cost(option)

        return sorted(found, key=order)

    def _column_parts(self, shape: TableShape, limit: int, *, is_only: bool) -> int:
        """Returns the least number of column parts, 2 or more, of at most `limit` bytes each.

        Returns 0 if no number fits. With `is_only`, returns the largest number of parts, whatever
        the limit.
        """
        most = min(self._ranks, self._width)
        if is_only:
            return column_parts(self._width, most)
        column = shape.rows * self._item_bytes
        fits = [w for w in range(2, most + 1) if column * -(-self._width // w) <= limit]
        return column_parts(self._width, fits[0]) if fits else 0

    def _largest_part(self, tables: Sequence[TableShape], kinds: Sequence[TableKind]) -> int:
        """Returns the largest size of a part in bytes: a rank's even share of the divided tables.

        A table larger than the share may become replicated. Then an even share of the remaining
        divided tables is smaller. The result is at most the capacity.
        """
        share = self._even_share(
            shape
            for shape in tables
            if self._cost(self._whole(shape, "table"))
            < self._cost(self._whole(shape, "replicated"))
        )
        while True:
            options = [self._options(shape, kinds, share)[0] for shape in tables]
            less = self._even_share(each.shape for each in options if each.kind != "replicated")
            if less >= share:
                break
            share = less
        return share if self._capacity is None else min(share, self._capacity)

    def _even_share(self, tables: Iterable[TableShape]) -> int:
        rows = sum(shape.rows for shape in tables)
        return -(-rows * self._width * self._item_bytes // self._ranks)

    def _whole(self, shape: TableShape, kind: TableKind) -> PlacedTable:
        ranks = (0,) if kind == "table" else tuple(range(self._ranks))
        return PlacedTable(shape=shape, kind=kind, ranks=ranks)

    def _load_whole(self, shape: TableShape) -> float:
        return self._rank_loads(self._placement(self._whole(shape, "table")))[0]

    def _rank_loads(self, placement: TablePlacement) -> tuple[float, ...]:
        return rank_loads(placement, samples=self._samples, item_bytes=self._item_bytes)

    def _cost(self, table: PlacedTable) -> float:
        """Returns the bytes that all ranks together send in a step for a table."""
        alone = self._placement(table)
        return all_bytes(alone, samples=self._samples, item_bytes=self._item_bytes)

    def _part_bytes(self, table: PlacedTable) -> int:
        return max(self._placement(table).memory_bytes(item_bytes=self._item_bytes))

    def _placement(self, *tables: PlacedTable) -> TablePlacement:
        return TablePlacement(tables=tables, width=self._width, ranks=self._ranks)
