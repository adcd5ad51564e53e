"""The closed forms of fusion, compared with known figures, and the best buckets compared with all
others.
"""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.controller import LinkCost, best_ends, finish_s

LAYERS, PER_LAYER = 96, 12
COUNT = LAYERS * PER_LAYER
READY = [float(j + 1) for j in range(COUNT)]  # ms
SERIAL = [float(COUNT)] * COUNT
ALONE = range(1, COUNT + 1)
BY_LAYER = range(PER_LAYER, COUNT + 1, PER_LAYER)


def cost(latency: float) -> LinkCost:
    """Returns a link on which a gradient of one byte takes 500 ms, including the latency."""
    return LinkCost(latency_s=latency, s_per_byte=500.0 - latency)


@pytest.mark.parametrize("latency", [0.0, 250.0, 499.0])
def test_without_fusion_only_the_sum_of_both_parts_counts(latency: float) -> None:
    assert finish_s(SERIAL, [1.0] * COUNT, ALONE, cost(latency)) == 577_152
    assert finish_s(READY, [1.0] * COUNT, ALONE, cost(latency)) == 576_001


@pytest.mark.parametrize(
    ("latency", "by_layer", "overlapped", "best"),
    [(250.0, 313_152, 312_012, 288_504), (499.0, 50_208, 49_068, 2_477)],
)
def test_fusion_gains_what_the_latency_is(
    latency: float, by_layer: float, overlapped: float, best: float
) -> None:
    sizes = [1.0] * COUNT
    assert finish_s(SERIAL, sizes, BY_LAYER, cost(latency)) == by_layer
    assert finish_s(READY, sizes, BY_LAYER, cost(latency)) == overlapped
    ends = best_ends(READY, sizes, cost(latency))
    assert finish_s(READY, sizes, ends, cost(latency)) == pytest.approx(best, abs=1)


amounts = st.floats(0.0, 4.0)


@given(
    st.lists(st.tuples(amounts, amounts), min_size=1, max_size=7),
    st.floats(0.0, 3.0),
    st.floats(0.0, 2.0),
)
def test_no_other_buckets_finish_earlier(
    gradients: list[tuple[float, float]], latency: float, per_byte: float
) -> None:
    ready, at = [], 0.0
    for gap, _ in gradients:
        at += gap
        ready.append(at)
    sizes = [size for _, size in gradients]
    link = LinkCost(latency_s=latency, s_per_byte=per_byte)
    count = len(ready)
    every = [
        (*inner, count)
        for chosen in range(count)
        for inner in combinations(range(1, count), chosen)
    ]
    best = min(finish_s(ready, sizes, ends, link) for ends in every)
    found = best_ends(ready, sizes, link)
    assert found in every
    assert finish_s(ready, sizes, found, link) == pytest.approx(best)


def test_no_gradients_need_no_bucket() -> None:
    assert best_ends([], [], LinkCost(latency_s=1.0, s_per_byte=1.0)) == ()
