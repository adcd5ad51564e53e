"""Embedding tables divided over two ranks, by one kind of division or by several kinds together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from parallel.worlds.dlrm_training import click_batches, compare_dlrm, small_shape
from unisono.parallel import Layout
from unisono.parallel.recommendation import DLRM, PlacedTable, TablePlacement, TableShape
from unisono.parallel.run import parallelize

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)


def test_dlrm_2(outcome):
    outcome.require_success()


def own_each_kind(world):
    for kind in ("table", "row", "column", "replicated", "auto"):
        compare_dlrm("dp=2", kind)
        # 10 samples in microbatches of 4, 3 and 3
        compare_dlrm("dp=2,zero=1", kind, microbatches=3)


def own_kinds_in_any_order(world):
    """Tests a model with one table of each kind. The columns are divided over the ranks in reverse
    order, and the table that is not divided or replicated is on rank 1.
    """
    shapes = small_shape().tables
    kinds = [("row", (0, 1)), ("column", (1, 0)), ("replicated", (0, 1)), ("table", (1,))]
    tables = tuple(
        PlacedTable(shape=shape, kind=kind, ranks=ranks)
        for shape, (kind, ranks) in zip(shapes, kinds, strict=True)
    )
    compare_dlrm("dp=2", TablePlacement(tables=tables, width=5, ranks=2))


def own_hybrid_shards_hold_each_table_once(world):
    for kind in ("table", "row", "column"):
        compare_dlrm("dp=2,zero=1,dp_replicate=2", kind)


def own_one_row_and_one_table(world):
    compare_dlrm("dp=2", "row", tables=small_shape().tables[:1])
    compare_dlrm("dp=2", "table", tables=small_shape().tables[:1], width=1)


def own_the_longest_bags(world):
    for kind in ("table", "row"):
        compare_dlrm("dp=2", kind, tables=(TableShape(rows=5, ids=255),))


def refused(text: str, pattern: str, placement: TablePlacement | str = "table") -> None:
    with pytest.raises(ValueError, match=pattern) as caught:
        parallelize(
            DLRM(small_shape(), placement=placement),
            Layout.parse(text),
            loss=functional.binary_cross_entropy_with_logits,
            optimizer=torch.optim.SGD,
        )
    assert "\n" not in str(caught.value)


def own_what_cannot_be_is_refused_in_one_line(world):
    axes = "tp x pp x cp = {}; dp = 2 works"
    refused("tp=2", axes.format("2 x 1 x 1 with ep = 1"))
    refused("pp=2", axes.format("1 x 2 x 1 with ep = 1"))
    refused("cp=2", "DLRM may need whole activations, but cp = 2 .* dp = 2 without cp works")
    refused("dp=2,ep=2", axes.format("1 x 1 x 1 with ep = 2"))
    refused("dp=2,zero=2", "zero = 2 does not divide embedding tables.*zero = 1 works")
    refused("dp=2,zero=3", "zero = 3 does not divide embedding tables.*replicated", "row")
    refused("dp=2", "kind: expected auto or one of table, row.*got 'rows'", "rows")
    other = PlacedTable(shape=small_shape().tables[0], kind="table", ranks=(0,))
    placement = TablePlacement(tables=(other,), width=5, ranks=2)
    refused("dp=2", "these 4 tables of width 5 on 2 ranks, got one of 1 tables", placement)


def own_an_id_that_is_no_row_is_named(world):
    """Tests that each rank refuses the id before it communicates, so that no other rank waits for
    it.
    """
    torch.set_default_dtype(torch.float64)
    model = DLRM(small_shape(), placement="row")
    run = parallelize(
        model, Layout(dp=2), loss=functional.binary_cross_entropy_with_logits, optimizer=sgd
    )
    (inputs, targets), *_ = click_batches(small_shape())
    inputs[:, 3] = 7
    with pytest.raises(ValueError, match="table 0: expected ids from 0 to 6, or -1 for none, got"):
        run.step(inputs, targets)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
