"""The cuts of a chain of operations, compared with an exhaustive search."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.parallel.run.pipeline.graph_cuts import choose_cuts

costs_and_bytes = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 2, 5, 20]), st.sampled_from([1, 2, 5, math.inf])),
    min_size=1,
    max_size=9,
)


@given(chain=costs_and_bytes, stages=st.integers(1, 4))
def test_costs_are_balanced_and_few_bytes_cross(
    chain: list[tuple[int, float]], stages: int
) -> None:
    costs, crossing = [cost for cost, _ in chain], [size for _, size in chain]

    def parts(firsts: tuple[int, ...]) -> list[int]:
        return [sum(costs[a:b]) for a, b in itertools.pairwise((*firsts, len(costs)))]

    possible = [
        (0, *inner)
        for inner in itertools.combinations(range(1, len(costs)), stages - 1)
        if all(math.isfinite(crossing[place]) for place in inner)
        and (stages == 1 or all(parts((0, *inner))))
    ]
    if not possible:
        with pytest.raises(ValueError, match=f"{stages} stages need {stages - 1} cuts, but"):
            choose_cuts(costs, crossing, stages)
        return
    least = min(max(parts(firsts)) for firsts in possible)
    balanced = [firsts for firsts in possible if max(parts(firsts)) <= 1.1 * least]
    best = min(
        (sum(crossing[place] for place in firsts[1:]), max(parts(firsts))) for firsts in balanced
    )
    found = choose_cuts(costs, crossing, stages)
    assert tuple(found) in balanced
    assert (sum(crossing[place] for place in found[1:]), max(parts(tuple(found)))) == best
