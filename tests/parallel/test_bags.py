"""Bags of ids and their sums, against sums in NumPy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from unisono.parallel.recommendation.divided_lookup import NO_ID, Bags, sum_bags

pytestmark = pytest.mark.torch
ROWS = 7

places = st.integers(0, 5).flatmap(
    lambda ids: st.lists(
        st.lists(st.integers(NO_ID, ROWS - 1), min_size=ids, max_size=ids), max_size=6
    ).map(lambda found: torch.tensor(found, dtype=torch.int64).reshape(len(found), ids))
)


@given(places)
def test_sums_of_bags_are_those_of_their_rows(found: torch.Tensor) -> None:
    weight = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one_hot = np.zeros((len(found), ROWS))
    for sample, ids in enumerate(found.tolist()):
        for each in ids:
            if each != NO_ID:
                one_hot[sample, each] += 1
    sums = sum_bags(weight, Bags.of_places(found))
    assert np.allclose(sums, one_hot @ weight.numpy(), rtol=1e-14)


@given(places, st.integers(0, ROWS), st.integers(0, ROWS))
def test_ranges_of_rows_add_up_to_the_whole(found: torch.Tensor, a: int, b: int) -> None:
    weight = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = Bags.of_places(found)
    cuts = [0, *sorted((a, b)), ROWS]
    parts = [
        sum_bags(weight[first:end], whole.of_rows(first, end - first))
        for first, end in pairwise(cuts)
    ]
    assert torch.allclose(torch.stack(parts).sum(0), sum_bags(weight, whole), rtol=1e-13)
