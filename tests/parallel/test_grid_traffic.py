"""Closed forms of 2D, 2.5D and 3D tensor parallelism, compared with the blocks of each rank."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from torch import nn

from unisono.parallel.divisible.interfaces import MicrobatchPart, exchanging
from unisono.parallel.layers import FeatureNorm, FeedForward, SelfAttention
from unisono.parallel.layers.tensor_grid import Tensor2D, Tensor3D
from unisono.parallel.rank_grid import RankGrid
from unisono.planner import Layout, Transformer, layer_elements
from unisono.planner.inputs.tensor_grid import TensorGrid

pytestmark = pytest.mark.torch
ITEM, WIDE = 2, 2
GRIDS = [("2d", 4), ("2d", 9), ("2d", 16), ("2.5d", 8), ("2.5d", 27), ("3d", 8), ("3d", 27)]


def bytes_of_rank(module: nn.Module, layout: Layout, rank: int, *, tokens: int) -> float:
    """Returns the bytes that a rank would send for a microbatch, from its place on the grid."""
    place = SimpleNamespace(
        layout=layout, coordinates=RankGrid(layout).coordinates(rank), group=lambda _: None
    )
    tensor = (Tensor3D if layout.tensor == "3d" else Tensor2D)(place)
    for each in module.modules():
        if hasattr(each, "_tensor"):
            each._tensor = tensor
        if isinstance(each, FeatureNorm):
            each._group = "the ranks of a row"
    part = MicrobatchPart(
        inputs=None,
        samples=1,
        tokens=tokens,
        whole_samples=1,
        item_bytes=ITEM,
        wide_bytes=WIDE,
    )
    return sum(each.bytes_sent([part])["tp"] for each in exchanging(module))


@pytest.mark.parametrize(("kind", "tp"), GRIDS)
def test_blocks_of_the_ranks_add_up_to_the_closed_form(kind: str, tp: int) -> None:
    hidden, tokens = 72, 27 * 16
    shape = Transformer(layers=1, hidden=hidden, heads=12, vocab=7, ffn=4 * hidden)
    layout = Layout(tp=tp, tensor=kind)
    sent = [
        bytes_of_rank(module, layout, rank, tokens=tokens) / ITEM
        for rank, module in product(range(tp), (SelfAttention(shape), FeedForward(shape)))
    ]
    expected = layer_elements(kind, tp, tokens=tokens, hidden=hidden)
    assert sum(sent) / tp == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("kind", "tp", "ratio"), [("2d", 4, 12.0), ("2d", 16, 1.9), ("3d", 8, 1)])
def test_enough_tokens_make_a_grid_cheaper_than_a_line(kind: str, tp: int, ratio: float) -> None:
    """Tests that a grid of ranks sends less than a line if the ratio of tokens to width is just
    above the given ratio, and not if it is just below. The ratios were derived by hand.
    """
    for factor, is_cheaper in ((1.05, True), (0.95, False)):
        sizes = {"tokens": round(ratio * factor * 10_000), "hidden": 10_000}
        line, grid = (layer_elements(each, tp, **sizes) for each in ("1d", kind))
        assert (grid < line) is is_cheaper


@pytest.mark.parametrize(
    ("kind", "tp", "grid"),
    [
        ("1d", 6, (1, 1, 6)),
        ("2d", 9, (1, 3, 3)),
        ("2.5d", 12, (3, 2, 2)),
        ("2.5d", 16, (1, 4, 4)),
        ("3d", 27, (3, 3, 3)),
    ],
)
def test_grids(kind: str, tp: int, grid: tuple[int, int, int]) -> None:
    assert TensorGrid.of(kind, tp) == grid


@pytest.mark.parametrize(
    ("kind", "tp", "told"),
    [
        ("2d", 8, "tp = q x q: 8 is not; 9 is"),
        ("2.5d", 6, "tp = d x q x q: 6 is not; 4 is"),
        ("3d", 4, "tp = l x l x l: 4 is not; 1 is"),
        ("4d", 4, "one of 1d, 2d, 2.5d, 3d, not '4d'"),
    ],
)
def test_what_makes_no_grid_is_refused_with_what_does(kind: str, tp: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Layout(tp=tp, tensor=kind)
