"""Recommendation models: embedding tables divided over ranks, and dense layers on every rank.

`DLRM` is the model, `DLRMShape` its sizes. `place_tables` chooses a `TablePlacement`, the ranks of
the parts of each table. `bag_exchange` sends ids to the ranks that hold their rows, and
`divided_lookup` returns the sums of the rows.
"""

from unisono.parallel.recommendation.dlrm_model import DLRM
from unisono.parallel.recommendation.exchange_traffic import rank_loads, step_bytes
from unisono.parallel.recommendation.greedy_placement import place_tables
from unisono.parallel.recommendation.table_placement import (
    KINDS,
    PlacedTable,
    TableKind,
    TablePiece,
    TablePlacement,
)
from unisono.parallel.recommendation.table_shapes import DLRMShape, TableShape

__all__ = [
    "DLRM",
    "KINDS",
    "DLRMShape",
    "PlacedTable",
    "TableKind",
    "TablePiece",
    "TablePlacement",
    "TableShape",
    "place_tables",
    "rank_loads",
    "step_bytes",
]
