"""The division of a model into pipeline stages, tested without ranks or training."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import itertools

from torch import nn

from unisono.parallel.run.pipeline.model_stages import (
    cut_stages,
    stage_count,
    stage_names,
    stages_of_rank,
)
from unisono.planner import Layout

pytestmark = pytest.mark.torch


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_the_largest_stage_is_as_small_as_any_cut_allows(costs, data) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    firsts = cut_stages(costs, stages)
    assert firsts[0] == 0 and sorted(set(firsts)) == firsts and len(firsts) == stages
    assert largest(costs, firsts) == min(
        largest(costs, (0, *inner))
        for inner in itertools.combinations(range(1, len(costs)), stages - 1)
    )


def largest(costs, firsts) -> float:
    return max(
        sum(costs[first:end]) for first, end in zip(firsts, [*firsts[1:], len(costs)], strict=True)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_stage_has_one_rank(schedule, pp) -> None:
    layout = Layout(pp=pp, vpp=2 if pp > 1 else 1, schedule=schedule)
    held = [stage for rank in range(pp) for stage in stages_of_rank(layout, rank)]
    assert sorted(held) == list(range(stage_count(layout)))


def test_an_embedding_costs_nothing() -> None:
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert stage_names(model, Layout(pp=2)) == [["0", "1"], ["2"]]
