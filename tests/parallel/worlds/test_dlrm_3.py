"""Embedding tables divided over three ranks. For each kind of division, training equals training in
one process.
"""

from __future__ import annotations

import pytest

from parallel.worlds.dlrm_training import compare_dlrm, small_tables

pytestmark = pytest.mark.torch
RANKS = 3
BACKENDS = ("unisono",)


def test_dlrm_3(outcome):
    outcome.require_success()


def own_tables_whole_on_one_rank(world):
    run = compare_dlrm("dp=3", "table")
    placement = run.stages[0][1].placement
    assert sorted({table.ranks for table in placement.tables}) == [(0,), (1,), (2,)]


def own_two_tables_leave_a_rank_without_any(world):
    run = compare_dlrm("dp=3", "table", tables=small_tables()[:2])
    assert [len(run.stages[0][1].placement.pieces(rank)) for rank in range(3)] == [1, 1, 0]


def own_rows(world):
    compare_dlrm("dp=3", "row")
    compare_dlrm("dp=3,zero=1", "row", microbatches=2)


def own_columns(world):
    compare_dlrm("dp=3", "column")  # the ranks have 2, 2 and 1 of 5 columns
    compare_dlrm("dp=3,zero=1", "column", width=2)  # with 2 columns, one rank has none


def own_replicas(world):
    compare_dlrm("dp=3", "replicated")
    compare_dlrm("dp=3,zero=3", "replicated")


def own_ranks_without_samples(world):
    for kind in ("table", "row", "column"):
        compare_dlrm("dp=3", kind, samples=2)
        # 7 samples in microbatches of 2, 2, 2 and 1
        compare_dlrm("dp=3", kind, samples=7, microbatches=4)
