"""Layouts of four ranks. With two strategies together, training equals training in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from torch_backend.layout_training import (
    compare_traced,
    compare_transformer,
    expert_shape,
    sgd,
    small_shape,
    token_batches,
)
from unisono import topology
from unisono.parallel import CrossEntropy, Layout, TransformerModel, parallelize
from unisono.planner import bubble_share, simulate_pipeline

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)


def test_layouts_4(outcome):
    outcome.require_success()


def own_data_and_tensor(world):
    compare_transformer("dp=2,tp=2,zero=1,sequence_parallel=1", microbatches=2)
    compare_transformer("dp=2,tp=2,zero=3,sequence_parallel=1")


def own_data_and_pipeline(world):
    compare_transformer("dp=2,pp=2,zero=1", microbatches=4)  # tied embeddings on two stages


def own_tensor_and_pipeline(world):
    compare_transformer("tp=2,pp=2,schedule=zb1p,sequence_parallel=1", microbatches=2)


def own_hybrid_shards(world):
    compare_transformer("dp=4,zero=1,dp_replicate=2")
    compare_transformer("dp=4,zero=3,dp_replicate=2", tied=False)


def own_four_ways(world):
    compare_transformer("tp=4")
    compare_transformer("tp=4,sequence_parallel=1", positions=6)  # 2, 2, 2 and 0 positions
    compare_transformer("pp=4", microbatches=4)


def own_context_and_tensor(world):
    compare_transformer("cp=2,tp=2,sequence_parallel=1", positions=8)
    compare_transformer("cp=2,pp=2,zero=1", microbatches=2)


def own_experts(world):
    compare_transformer("dp=4,ep=4", microbatches=2, **expert_shape())
    compare_transformer("dp=2,tp=2,ep=4,zero=1", **expert_shape())
    compare_transformer("dp=4,ep=2,dp_replicate=2", **expert_shape())
    compare_transformer("dp=2,pp=2,ep=2", microbatches=4, **expert_shape(layers=4))


def own_divided_experts(world):
    # two ranks divide three experts
    compare_transformer("dp=4,ep=2,zero=2", microbatches=2, **expert_shape(experts=6))
    compare_transformer("dp=4,ep=2,zero=3,dp_replicate=2", **expert_shape())
    # each expert is divided, and the dense parameters stay whole
    compare_transformer("tp=4,ep=2,zero=3", **expert_shape(experts=2))
    compare_transformer(
        "dp=2,tp=2,ep=2,zero=3,sequence_parallel=1", microbatches=2, dropout=0.2, **expert_shape()
    )
    compare_transformer("dp=2,cp=2,ep=2,zero=3", **expert_shape())
    compare_transformer("dp=2,pp=2,ep=2,zero=3", microbatches=4, **expert_shape(layers=4))


def own_divided_weights_in_a_pipeline(world):
    compare_transformer("dp=2,pp=2,zero=2", microbatches=4)
    compare_transformer("dp=2,pp=2,zero=3,schedule=zb1p", microbatches=4)
    compare_transformer("dp=2,pp=2,vpp=2,zero=3,schedule=zbv", microbatches=4, tied=False)
    # torch gathers the weights of a rank's fourth stage more than once
    compare_transformer(
        "dp=2,pp=2,vpp=4,zero=3,schedule=interleaved", microbatches=2, layers=6, tied=False
    )


def own_memory_of_divided_experts(world):
    """Tests that each of four ranks stores a quarter of all parameters, and of their gradients and
    momentum. Two ranks divide one expert, or two experts.
    """
    torch.set_default_dtype(torch.float64)
    for experts in (2, 4):
        shape = small_shape(**expert_shape(experts=experts), vocab=12)
        run = parallelize(
            TransformerModel(shape),
            Layout(dp=4, ep=2, zero=3),
            loss=CrossEntropy(shape.vocab),
            optimizer=sgd,
        )
        run.step(*token_batches(shape)[0])
        quarter = (8 * shape.parameters / 4,) * RANKS
        memory = dict.fromkeys(("weights", "gradients", "optimizer"), quarter)
        report = run.report()
        assert report.memory == memory
        assert report.predicted.memory == memory
        run.mesh.close()


def own_plane(world):
    # tied embeddings, and a vocabulary that is divided into 6 and 5 words
    compare_transformer("tp=4,tensor=2d", microbatches=2)
    compare_transformer("tp=4,tensor=2d", gated=True, kv_heads=2, tied=False, ffn=26)
    with pytest.raises(ValueError, match=r"depth x rows = 1 x 1 x 1 x 2 = 2, got 7; 8 works"):
        compare_transformer("tp=4,tensor=2d", samples=7)


def own_dropout(world):
    compare_transformer("dp=4,zero=3", microbatches=2, samples=7, dropout=0.3)
    compare_transformer("tp=2,pp=2,sequence_parallel=1", microbatches=2, dropout=0.3)
    compare_transformer("cp=2,tp=2,sequence_parallel=1", positions=8, dropout=0.3)
    compare_transformer("dp=2,pp=2,schedule=zbv", microbatches=4, dropout=0.3)
    compare_transformer("tp=4,tensor=2d", microbatches=2, dropout=0.3)


def own_capacity(world):
    few = {"capacity_factor": 0.6, **expert_shape()}
    run = compare_transformer("dp=2,tp=2,ep=4,zero=1", microbatches=2, **few)
    assert any(each.dropped for each in run.stages[0][1].modules() if hasattr(each, "dropped"))
    compare_transformer("cp=2,tp=2,ep=2,sequence_parallel=1", positions=8, dropout=0.2, **few)
    compare_transformer("tp=4", **few | {"positions": 6})  # the ranks have 2, 2, 2 and 0 positions
    compare_transformer("cp=4", positions=16, **few)
    with pytest.raises(ValueError, match="capacity_factor: expected a number above 0, got 0"):
        compare_transformer("dp=4", **few | {"capacity_factor": 0.0})


def own_traced_model(world):
    compare_traced("pp=4,schedule=gpipe", microbatches=4)
    compare_traced("pp=4", microbatches=4)
    compare_traced("dp=2,pp=2,zero=1", microbatches=2)


def own_bubbles(world):
    for schedule, chunks, counts in (
        ("gpipe", 1, (4, 8)), ("1f1b", 1, (4, 8)), ("interleaved", 2, (8, 16)),
        ("zb1p", 1, (8, 16)), ("zbv", 1, (4, 5, 6, 8, 16)), ("dualpipev", 1, (8, 16)),
    ):  # fmt: skip
        layout = Layout(pp=4, vpp=chunks, schedule=schedule)
        for microbatches in counts:
            waits = 3 * bubble_share(layout, "none", microbatches)
            found = _predicted_bubble(layout, microbatches)
            assert found == pytest.approx(waits / (microbatches + waits), rel=1e-9), layout


def _predicted_bubble(layout, microbatches):
    run = _chain(layout, microbatches)
    run.step(torch.ones(microbatches, 3), torch.zeros(microbatches, 3))
    return run.report().predicted.bubble


def own_passes(world):
    run = _chain(Layout(dp=2, pp=2, schedule="zb1p"), 4)
    for early in (run.report, run.passes, run.pipeline_schedule):
        with pytest.raises(ValueError, match="expected a step before"):
            early()
    for _ in range(2):
        run.step(torch.ones(8, 3), torch.zeros(8, 3))
    passes = run.passes()
    for rank in range(2):
        predicted, measured = (
            [span.task for span in passes[name].spans[rank]] for name in ("predicted", "measured")
        )
        assert predicted == measured
        assert sorted(task.kind for task in measured) == ["F"] * 4 + ["I"] * 4 + ["W"] * 4
    assert 0 < passes["predicted"].bubble < 1
    schedule = run.pipeline_schedule()
    assert schedule.ranks == tuple(map(tuple, run.tasks()))
    assert schedule.name == "zb1p" and all(each.weight_gradient_s > 0 for each in schedule.stages)
    steps = simulate_pipeline(schedule, topology.ring(2)).result.steps
    sent = steps.bytes[steps.messages()]
    pipeline = run.mesh.grid.group(0, "pp")
    measured = [run.report().bytes_sent["pp"][rank] for rank in pipeline]
    assert [sum(sent[steps.src[steps.messages()] == place]) for place in (0, 1)] == measured


def _chain(layout, microbatches):
    return parallelize(
        nn.Sequential(*(nn.Linear(3, 3) for _ in range(8))),
        layout,
        loss=nn.functional.mse_loss,
        optimizer=sgd,
        microbatches=microbatches,
    )
