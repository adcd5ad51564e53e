"""Recommendation models: embedding tables divided over ranks, and dense layers on every rank.

`DLRM` is the model. Its sizes are those of the planner's `Dlrm`, here also called `DLRMShape`.
`place_tables` of the planner chooses a `TablePlacement`, the ranks of the parts of each table.
`divided_lookup` sends ids to the ranks that hold the rows of these ids, and returns the sums of the
rows.
"""

from unisono.parallel.recommendation.dlrm_model import DLRM, dlrm_shape
from unisono.planner.recommendation import Dlrm as DLRMShape
from unisono.planner.recommendation import (
    PlacedTable,
    TableKind,
    TablePiece,
    TablePlacement,
    TableShape,
    place_tables,
)

__all__ = [
    "DLRM",
    "DLRMShape",
    "PlacedTable",
    "TableKind",
    "TablePiece",
    "TablePlacement",
    "TableShape",
    "dlrm_shape",
    "place_tables",
]
