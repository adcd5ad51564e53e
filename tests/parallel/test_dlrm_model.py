"""The recommendation model in one process, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from unisono.parallel import DLRM, DLRMShape, TableShape, dlrm_shape

pytestmark = pytest.mark.torch
SHAPE = DLRMShape(
    counters=2,
    width=3,
    tables=(TableShape(rows=5, ids=2), TableShape(rows=4)),
    bottom=(4,),
    top=(6,),
)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_logits_are_those_of_the_formulas() -> None:
    model = DLRM(SHAPE, seed=4)
    values = {name: each.detach().numpy() for name, each in model.named_parameters()}
    batch = np.array([[3, 0, 4, 4, 1], [7, -1, -1, 2, -1]])

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ values[f"{name}.weight"].T + values[f"{name}.bias"]

    for sample, logit in zip(batch, model(torch.from_numpy(batch)).tolist(), strict=True):
        dense = np.log1p(np.maximum(sample[:2], 0))
        for layer in (0, 2):
            dense = np.maximum(linear(dense, f"bottom.{layer}"), 0)
        bags = [[i for i in ids if i >= 0] for ids in (sample[2:4], sample[4:])]
        sums = [values[f"tables.weights.{t}"][ids].sum(0) for t, ids in enumerate(bags)]
        first, second = sums
        products = [first @ dense, second @ dense, second @ first]
        top = linear(np.concatenate([dense, products]), "top.0")
        expected = linear(np.maximum(top, 0), "top.2")
        assert logit == pytest.approx(expected.item(), rel=1e-13)


def test_equal_ids_of_a_bag_add_their_gradients() -> None:
    model = DLRM(SHAPE, seed=4)
    for ids in ([2, 2, 0], [2, -1, 0]):
        model.zero_grad()
        model.tables(torch.tensor([ids])).sum().backward()
        gradient = model.tables.weights[0].grad
        assert gradient is not None
        assert gradient.tolist() == [[float(row == 2) * (ids.count(2))] * 3 for row in range(5)]


def test_ids_that_are_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="table 1: expected ids from 0 to 3, or -1 for none, got"):
        DLRM(SHAPE)(torch.tensor([[0, 0, 1, 1, 4]]))
    with pytest.raises(ValueError, match=r"table 0: expected ids from 0 to 4, .* got -2 to 1"):
        DLRM(SHAPE)(torch.tensor([[0, 0, -2, 1, 3]]))


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="tables: expected at least one, got none"):
        DLRMShape(counters=1, width=1, tables=(), bottom=(), top=())
    with pytest.raises(ValueError, match="width: expected at least 1, got 0"):
        DLRMShape(counters=1, width=0, tables=SHAPE.tables, bottom=(), top=())
    crossed = replace(SHAPE, interaction="cross", cross_layers=1, cross_rank=2)
    with pytest.raises(ValueError, match="DLRM computes dot products; expected dot, got 'cross'"):
        DLRM(crossed)


class Clicks(nn.Module):
    """A model of torch's own modules with the sizes of a shape."""

    def __init__(self, shape: DLRMShape, inputs: int | None = None) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(table.rows, shape.width) for table in shape.tables
        )
        self.bottom, self.top = nn.ModuleList(), nn.ModuleList()
        top = (inputs or shape.top_widths[0], *shape.top_widths[1:])
        for network, widths in ((self.bottom, shape.bottom_widths), (self.top, top)):
            network.extend(nn.Linear(*pair) for pair in pairwise(widths))


def test_the_shape_of_a_module() -> None:
    assert dlrm_shape(DLRM(SHAPE)) == SHAPE
    assert dlrm_shape(Clicks(SHAPE), ids=[2, 1]) == SHAPE
    deep = replace(SHAPE, bottom=(7, 9), top=(8, 6))
    assert dlrm_shape(Clicks(deep), ids=[2, 1]) == deep


def test_modules_of_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="top network of 9 inputs, but dot products of 3 vectors"):
        dlrm_shape(Clicks(SHAPE, inputs=9))
    with pytest.raises(ValueError, match=r"ids: expected a number for each of 2 tables, got \[1\]"):
        dlrm_shape(Clicks(SHAPE), ids=[1])
    with pytest.raises(ValueError, match="expected embedding tables of one width, found 0"):
        dlrm_shape(nn.Linear(2, 2))
    model = Clicks(SHAPE)
    model.more = nn.Linear(1, 4)
    with pytest.raises(ValueError, match="then layers that end with 1, found"):
        dlrm_shape(model)
    uneven = Clicks(SHAPE)
    uneven.tables.append(nn.EmbeddingBag(4, 5))
    with pytest.raises(ValueError, match=r"found 3 of widths \[3, 5\]"):
        dlrm_shape(uneven)
