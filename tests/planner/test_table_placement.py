"""The placement of embedding tables is complete, fits the memory, is balanced, and is always the
same.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from table_bytes import step_bytes
from unisono.planner.recommendation import (
    TABLE_KINDS,
    PlacedTable,
    TablePlacement,
    TableShape,
    pass_bytes,
    place_tables,
    rank_loads,
)
from unisono.planner.recommendation.exchange_traffic import SIZES_BYTES, all_bytes, piece_load

shapes = st.lists(
    st.builds(TableShape, rows=st.integers(1, 5000), ids=st.integers(1, 60)), min_size=1, max_size=9
)
sizes = st.fixed_dictionaries(
    {
        "width": st.integers(1, 20),
        "ranks": st.integers(1, 6),
        "samples": st.integers(1, 2000),
        "item_bytes": st.sampled_from([4, 8]),
    }
)
kinds = st.sampled_from(["auto", *TABLE_KINDS])


@given(shapes, sizes, kinds)
def test_each_element_of_a_table_is_on_one_rank_or_on_all(
    tables: list[TableShape], options: dict[str, Any], kind: str
) -> None:
    placement = place_tables(tables, kind=kind, **options)
    assert [placed.shape for placed in placement.tables] == tables
    held = [np.zeros((table.rows, options["width"]), int) for table in tables]
    for rank in range(options["ranks"]):
        for piece in placement.pieces(rank):
            (row, column), (rows, columns) = piece.start, piece.sizes
            held[piece.table][row : row + rows, column : column + columns] += 1
    for placed, counts in zip(placement.tables, held, strict=True):
        assert (counts == (placed.kind != "replicated")).all()
        assert kind in ("auto", placed.kind) or options["ranks"] == 1
    elements = sum(table.rows for table in tables) * options["width"]
    whole = placement.replicated_rows * options["width"] * (options["ranks"] - 1)
    memory = placement.memory_bytes(item_bytes=options["item_bytes"])
    assert sum(memory) == (elements + whole) * options["item_bytes"]


@given(shapes, sizes, kinds)
def test_loads_differ_by_at_most_one_part(
    tables: list[TableShape], options: dict[str, Any], kind: str
) -> None:
    placement = place_tables(tables, kind=kind, **options)
    step = {"samples": options["samples"], "item_bytes": options["item_bytes"]}
    loads = rank_loads(placement, **step)
    parts = [
        piece_load(placement, piece, **step)
        for rank in range(options["ranks"])
        for piece in placement.pieces(rank)
    ]
    assert max(loads) - min(loads) <= max(parts, default=0) * (1 + 1e-9)
    assert placement == place_tables(tables, kind=kind, **options)


@given(shapes, sizes, kinds, st.floats(0.2, 3))
def test_memory_stays_within_the_capacity(
    tables: list[TableShape], options: dict[str, Any], kind: str, share: float
) -> None:
    elements = sum(table.rows for table in tables) * options["width"]
    capacity = int(elements * options["item_bytes"] / options["ranks"] * share)
    try:
        placement = place_tables(tables, kind=kind, capacity_bytes=capacity, **options)
    except ValueError as refusal:
        assert f"capacity_bytes is {capacity}; expected at least" in str(refusal)
        return
    assert max(placement.memory_bytes(item_bytes=options["item_bytes"])) <= capacity


@given(shapes, sizes, kinds)
def test_the_bytes_of_the_ranks_add_up(
    tables: list[TableShape], options: dict[str, Any], kind: str
) -> None:
    placement = place_tables(tables, kind=kind, **options)
    step = {"samples": options["samples"], "item_bytes": options["item_bytes"]}
    ranks = options["ranks"]
    tells = ranks * (ranks - 1) * SIZES_BYTES * placement.is_divided
    assert sum(step_bytes(placement, **step)) == pytest.approx(all_bytes(placement, **step) + tells)


@given(shapes, sizes)
def test_a_table_larger_than_an_even_share_is_divided(
    tables: list[TableShape], options: dict[str, Any]
) -> None:
    assume(options["ranks"] > 1)
    placement = place_tables(tables, **options)
    divided = [placed for placed in placement.tables if placed.kind != "replicated"]
    share = sum(placed.shape.rows for placed in divided) / options["ranks"]
    assert all(placed.shape.rows <= share + 1 for placed in divided if placed.kind == "table")


@pytest.mark.parametrize(
    ("rows", "ids", "samples", "kind"),
    [
        # many rows and few samples: the sums of bags have fewer bytes than the table
        (1000, 1, 64, "column"),
        (1000, 100, 64, "row"),  # long bags: a row division sends each id to one rank only
        # few rows and many samples: the gradient has fewer bytes than the sums
        (10, 1, 64, "replicated"),
    ],
)
def test_the_kind_with_fewest_bytes_is_chosen(rows: int, ids: int, samples: int, kind: str) -> None:
    table = TableShape(rows=rows, ids=ids)
    sizes = {"width": 16, "ranks": 4, "samples": samples}
    placement = place_tables([table], **sizes)
    assert placement.tables[0].kind == kind

    def cost(of: str) -> float:
        placed = place_tables([table], kind=of, **sizes)
        return sum(step_bytes(placed, samples=samples, item_bytes=4))

    assert cost(kind) == min(cost(each) for each in ("row", "column", "replicated"))


@pytest.mark.parametrize(("ranks", "bags"), list(product((2, 3, 4), (1, 5))))
def test_bytes_of_equal_tables_follow_the_known_forms(ranks: int, bags: int) -> None:
    """Compares bytes with the known closed forms, for one table per rank."""
    width, batch, item = 16, 12, 4
    tables = [TableShape(rows=1000, ids=bags)] * ranks
    rest = (ranks - 1) / ranks
    ids, sums = 8 * batch * ranks * bags, batch * ranks * width * item
    tells = (ranks - 1) * 16
    expected = {
        "table": rest * (batch * ranks + ids + 2 * sums) + tells,
        "row": (ranks - 1) * batch * ranks + rest * ids + 2 * (ranks - 1) * sums + tells,
        "replicated": 2 * rest * 1000 * ranks * width * item,
    }
    if width % ranks == 0:  # each rank has an equal number of columns of each table
        expected["column"] = (ranks - 1) * (batch * ranks + ids) + rest * 2 * sums + tells
    for kind, form in expected.items():
        placed = place_tables(tables, width=width, ranks=ranks, samples=batch * ranks, kind=kind)
        found = step_bytes(placed, samples=batch * ranks, item_bytes=item)
        assert found == pytest.approx([form] * ranks), kind


def test_nothing_is_sent_for_replicas_in_a_pass() -> None:
    placed = place_tables([TableShape(rows=5)], width=2, ranks=2, samples=9, kind="replicated")
    assert pass_bytes(placed, 0, samples=[5, 4], ids=lambda piece: 1, item_bytes=4) == 0


def test_what_cannot_be_is_refused() -> None:
    table = TableShape(rows=100)

    def one(kind: Any, ranks: tuple[int, ...]) -> None:
        placed = PlacedTable(shape=table, kind=kind, ranks=ranks)
        TablePlacement(tables=(placed,), width=4, ranks=3)

    for kind, ranks, pattern in (
        ("tables", (0,), "expected one of table, row, column, replicated, got 'tables'"),
        ("table", (0, 1), "expected one rank for the kind table, got"),
        ("table", (3,), "expected distinct ranks below 3"),
        ("column", (1, 1), "expected distinct ranks below 3"),
        ("column", (), "0 ranks cannot divide 4 columns; 1 can"),
        ("column", (0, 1, 2), "3 ranks cannot divide 4 columns; 2 can"),
        ("row", (0, 1), "expected all 3 ranks for row"),
    ):
        with pytest.raises(ValueError, match=pattern):
            one(kind, ranks)
    with pytest.raises(ValueError, match="kind: expected auto or one of table"):
        place_tables([table], width=4, ranks=2, samples=8, kind="rows")
    pattern = r"table 0: 100 rows .* capacity_bytes is 10; expected at least 800"
    with pytest.raises(ValueError, match=pattern):
        place_tables([table], width=4, ranks=2, samples=8, capacity_bytes=10)
    with pytest.raises(ValueError, match="ids: expected 1 to 255, got 256"):
        TableShape(rows=1, ids=256)
    with pytest.raises(ValueError, match="rows: expected at least 1, got 0"):
        TableShape(rows=0)
