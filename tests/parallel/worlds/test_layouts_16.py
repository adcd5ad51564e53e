"""Layouts of sixteen ranks that combine all axes, or grids and pipelines. Training equals one
process, with less than 2 GiB per rank.
"""

from __future__ import annotations

import resource

import pytest

from parallel.worlds.layout_training import compare_transformer, expert_shape

pytestmark = [pytest.mark.torch, pytest.mark.slow]
RANKS = 16
BACKENDS = ("unisono",)
MOST_KIB = 2 << 20


def test_layouts_16(outcome):
    outcome.require_success()


def own_all_axes(world):
    compare_transformer(
        "dp=2,cp=2,tp=2,pp=2,ep=4",
        microbatches=2,
        **expert_shape(layers=4, positions=24, dense_layers=0),
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < MOST_KIB


def own_all_axes_with_sharded_states(world):
    compare_transformer(
        "dp=2,cp=2,tp=2,pp=2,ep=8,schedule=zb1p,zero=1,sequence_parallel=1",
        microbatches=2,
        **expert_shape(layers=4, positions=24, experts=8),
    )


def own_grids_with_split_backward_passes(world):
    for kind in ("2.5d", "3d"):
        text = f"pp=2,tp=8,tensor={kind},schedule=zb1p"
        compare_transformer(text, microbatches=2, dropout=0.2, layers=2)
