"""Recommendation models: the sizes of a DLRM, the placement of its tables, and predictions.

>>> from unisono.planner import Workload, recommendation
>>> job = Workload(seq=1, global_batch=65536, precision="tf32")
>>> step = recommendation.predict("dlrm-mlperf", "a100:8", "dp=8", job)
>>> step.low_s < step.step_s < step.high_s
True

`unisono.parallel` places and trains the tables. No other module of the planner imports this folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy_names import lazy_names
from unisono.planner.recommendation.dlrm import Dlrm, TableShape, is_dlrm, load_dlrm
from unisono.planner.recommendation.exchange_traffic import pass_bytes, rank_loads
from unisono.planner.recommendation.greedy_placement import place_tables
from unisono.planner.recommendation.table_placement import (
    TABLE_KINDS,
    PlacedTable,
    TableKind,
    TablePiece,
    TablePlacement,
)

if TYPE_CHECKING:
    from unisono.planner.recommendation.dlrm_prediction import DlrmPrediction, predict, search

__getattr__ = lazy_names(
    __name__, {f"{__name__}.dlrm_prediction": ("DlrmPrediction", "predict", "search")}
)

__all__ = [
    "TABLE_KINDS",
    "Dlrm",
    "DlrmPrediction",
    "PlacedTable",
    "TableKind",
    "TablePiece",
    "TablePlacement",
    "TableShape",
    "is_dlrm",
    "load_dlrm",
    "pass_bytes",
    "place_tables",
    "predict",
    "rank_loads",
    "search",
]
