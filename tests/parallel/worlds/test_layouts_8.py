"""Layouts of eight ranks. With three axes, with 2D and 3D tensor parallelism, and with experts that
ZeRO divides in a pipeline, training equals training in one process.
"""

from __future__ import annotations

import pytest
import torch

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_transformer, expert_shape
from parallel.worlds.test_sequences_mixed import compare as compare_decoder

pytestmark = pytest.mark.torch
RANKS = 8
BACKENDS = ("unisono",)
UNEVEN = {"layers": 2, "hidden": 20, "ffn": 26, "gated": True, "kv_heads": 2, "tied": False}


def test_layouts_8(outcome):
    outcome.require_success()


def own_three_axes(world):
    compare_transformer("dp=2,tp=2,pp=2,zero=1", microbatches=2)  # tied embeddings
    compare_transformer("dp=2,cp=2,pp=2,zero=3", microbatches=2, layers=2, tied=False)


def own_three_axes_of_any_model(world):
    torch.set_default_dtype(torch.float64)
    for text in ("cp=2,tp=2,pp=2", "dp=2,cp=2,tp=2,zero=3", "dp=2,cp=2,pp=2,zero=3"):
        with turn(text=text):
            compare_decoder(text, "rotary")
    compare_decoder("dp=2,cp=2,tp=2,ep=4,zero=1", "rotary", model={"has_experts": True})


def own_replicas_of_uneven_parts(world):
    """Tests parts whose numbers of elements do not divide by the number of replicas."""
    compare_transformer("dp=8,dp_replicate=4,zero=2", layers=1, ffn=27, tied=False)


def own_experts_with_three_axes(world):
    compare_transformer(
        "dp=2,cp=2,tp=2,ep=4,zero=1,sequence_parallel=1", **expert_shape(positions=8)
    )
    compare_transformer(
        "cp=2,tp=2,pp=2,ep=2,schedule=zb1p", microbatches=2, **expert_shape(layers=2, positions=8)
    )


def own_planes(world):
    compare_transformer("tp=8,tensor=2.5d", microbatches=2)  # tied embeddings
    compare_transformer("tp=8,tensor=2.5d", dropout=0.3, **UNEVEN)


def own_cube(world):
    compare_transformer("tp=8,tensor=3d", layers=2)  # tied embeddings
    compare_transformer("tp=8,tensor=3d", microbatches=2, dropout=0.3, **UNEVEN)


def own_plane_with_other_axes(world):
    compare_transformer("dp=2,tp=4,tensor=2d,zero=1", **UNEVEN)
    compare_transformer("pp=2,tp=4,tensor=2d", microbatches=2, layers=2)
    compare_transformer("cp=2,tp=4,tensor=2d", layers=2, positions=8)


def own_plane_with_divided_weights(world):
    compare_transformer("dp=2,tp=4,tensor=2d,zero=3", **UNEVEN)


def own_plane_with_split_backward_passes(world):
    compare_transformer("pp=2,tp=4,tensor=2d,schedule=zb1p", microbatches=2, dropout=0.2)
    compare_transformer(
        "pp=2,tp=4,tensor=2d,vpp=2,schedule=dualpipev", microbatches=4, **UNEVEN | {"layers": 4}
    )


def own_divided_experts_in_a_pipeline(world):
    compare_transformer(
        "pp=2,dp=4,ep=2,zero=3,schedule=zb1p", microbatches=2, **expert_shape(layers=4)
    )
