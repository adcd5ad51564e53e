"""Tests that no algorithm is faster than the lower bound."""

from __future__ import annotations

import pytest

from unisono import topology
from unisono.simulator import Conditions, LinkModel, Regime, bound_s, compare
from unisono.types import Op

SPECS = (
    *("ring:5", "line:4", "mesh:5", "star:5", "torus:2x3", "torus:3x3", "grid:3x3", "torus:3x3x3"),
    *("fat_tree:4", "leaf_spine:leaves=3,spines=1,hosts=2,oversubscription=8"),
    *("dragonfly:a=2,p=1,h=1", "dragonfly:a=3,p=1,h=2", "dragonfly_plus:4"),
)


@pytest.mark.parametrize("spec", SPECS)
def test_no_algorithm_is_faster(spec: str) -> None:
    net = topology.parse(f"{spec},latency=0ns")
    for op in Op:
        if op is not Op.BARRIER:
            least_s = min(e.result.time_s for e in compare(op, net, 1e9) if e.result is not None)
            assert bound_s(op, net, 1e9) <= least_s * (1 + 1e-9), op


def test_small_measured_messages_may_be_faster() -> None:
    model = LinkModel(
        regimes=(
            Regime(least=0, alpha_s=0, byte_s=1e-10),
            Regime(least=1e6, alpha_s=-1e-4, byte_s=2e-10),
        ),
        op="all_reduce",
        ranks=2,
        algorithm="ring",
    )
    assert model.lightest(1e9) == pytest.approx(0.5)
    assert model.lightest(1e5) == pytest.approx(0.5)
    net = topology.star(8)
    conditions = Conditions(messages=model)
    for nbytes in (1e5, 2e6, 1e8):
        found = compare("all_reduce", net, nbytes, conditions=conditions)
        least_s = min(e.result.time_s for e in found if e.result is not None)
        whole_s = bound_s("all_reduce", model.network(net), nbytes)
        assert model.lightest(nbytes) * whole_s <= least_s * (1 + 1e-9)
