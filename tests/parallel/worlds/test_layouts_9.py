"""Layouts of nine ranks: a plane of 3 x 3 ranks, and lines of 3 ranks. Training equals training in
one process.
"""

from __future__ import annotations

import pytest

from parallel.worlds.layout_training import compare_transformer

pytestmark = [pytest.mark.torch, pytest.mark.slow]
RANKS = 9
BACKENDS = ("unisono",)
HEADS = {"heads": 6, "kv_heads": 3}


def test_layouts_9(outcome):
    outcome.require_success()


def own_plane(world):
    compare_transformer("tp=9,tensor=2d", microbatches=2, samples=6, **HEADS)  # tied embeddings
    uneven = {"hidden": 30, "ffn": 26, "gated": True, "tied": False, "layers": 2}
    compare_transformer("tp=9,tensor=2d", samples=6, dropout=0.3, **HEADS | uneven)


def own_lines(world):
    compare_transformer("dp=3,tp=3,zero=1", microbatches=2, **HEADS)
    compare_transformer("tp=3,pp=3,schedule=zb1p", microbatches=3, samples=6, **HEADS)
