"""Layouts of four ranks. With two strategies together, training equals training in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from parallel.worlds.layout_training import (
    SCHEDULES,
    chain,
    compare_in_float32,
    compare_model,
    compare_passes,
    compare_schedules,
    compare_traced,
    compare_transformer,
    crowded_model,
    expert_shape,
    sgd,
    small_shape,
    token_batches,
)
from unisono import topology
from unisono.parallel import CrossEntropy, Layout, TransformerModel, parallelize
from unisono.parallel.run.parameters import flat_sets
from unisono.parallel.run.pipeline.stage_messages import HEADER_BYTES
from unisono.pipeline import simulate_pipeline

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
SPLIT = ("zb1p", "zbv", "dualpipev")
"""Schedules with separate passes for the gradients of inputs and of weights."""


def test_layouts_4(outcome):
    outcome.require_success()


def own_data_and_tensor(world):
    compare_transformer("dp=2,tp=2,zero=1,sequence_parallel=1", microbatches=2)
    compare_transformer("dp=2,tp=2,zero=3,sequence_parallel=1")


def own_copied_heads(world):
    """Four ranks divide four heads, and two ranks keep each of two heads of keys, or all the one
    head."""
    for changes in ({"kv_heads": 2}, {"kv_heads": 1, "gated": True, "tied": False}):
        compare_transformer("tp=4", microbatches=2, **changes)
        compare_transformer("tp=4,sequence_parallel=1", **changes)
    compare_transformer("dp=2,tp=2,zero=3", microbatches=2, kv_heads=1, tied=False)
    compare_transformer("dp=2,tp=2,zero=1", microbatches=2, kv_heads=1, gated=True)
    compare_transformer("cp=2,tp=2", microbatches=2, kv_heads=1)
    compare_transformer("pp=2,tp=2", microbatches=2, kv_heads=1, tied=True)
    compare_transformer("tp=2,dp=2,ep=2", microbatches=2, **expert_shape(kv_heads=1))


def own_data_and_pipeline(world):
    compare_transformer("dp=2,pp=2,zero=1", microbatches=4)  # tied embeddings on two stages


def own_overlap_changes_no_bits(world):
    """Within a host, sums that run while passes run have the bits of those after the passes."""
    torch.set_default_dtype(torch.float32)
    try:
        shape = small_shape(tied=False)
        for text in ("dp=4", "dp=4,zero=1"):
            weights = []
            for overlap in (True, False):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(flat_sets, "_BUCKET_BYTES", 3000)
                    model = TransformerModel(shape, seed=1)
                    run = parallelize(
                        model, Layout.parse(text), loss=CrossEntropy(shape.vocab), optimizer=sgd,
                        overlap=overlap,
                    )  # fmt: skip
                assert bool(run.sets[0].buckets) is overlap
                for batch in token_batches(shape):
                    run.step(*batch)
                weights.append([each.detach().clone() for each in model.parameters()])
                run.mesh.close()
            assert all(map(torch.equal, *weights))
    finally:
        torch.set_default_dtype(torch.float64)


def own_every_schedule(world):
    compare_schedules(4)


def own_tensor_and_pipeline(world):
    compare_transformer("tp=2,pp=2,schedule=zb1p,sequence_parallel=1", microbatches=2)


def own_hybrid_shards(world):
    compare_transformer("dp=4,zero=1,dp_replicate=2")
    compare_transformer("dp=4,zero=3,dp_replicate=2", tied=False)


def own_four_ways(world):
    compare_transformer("tp=4")
    compare_transformer("tp=4,sequence_parallel=1", positions=6)  # 2, 2, 2 and 0 positions
    # the parts have 2, 2, 2 and 1 of 7 rows, and 2, 2, 1 and 0 of 5 words
    compare_transformer("tp=4", microbatches=2, ffn=7, vocab=5)
    compare_transformer("tp=4", ffn=10, gated=True, tied=False)


def own_context_and_tensor(world):
    compare_transformer("cp=2,tp=2,sequence_parallel=1", positions=8)
    compare_transformer("cp=2,pp=2,zero=1", microbatches=2)
    compare_transformer("cp=2,pp=2,schedule=zb1p", microbatches=2)  # splits the backward of a ring


def own_kinds_of_context(world):
    compare_transformer("cp=4,zero=1", context="ulysses", positions=16, kv_heads=2)
    compare_transformer("dp=2,cp=2", context="allgather", kv_heads=2)
    compare_transformer("dp=2,cp=2,zero=3", is_causal=False)


def own_experts(world):
    compare_transformer("dp=4,ep=4", microbatches=2, **expert_shape())
    compare_transformer("dp=2,tp=2,ep=4,zero=1", **expert_shape())
    compare_transformer("dp=4,ep=2,dp_replicate=2", **expert_shape())
    compare_transformer("dp=2,pp=2,ep=2", microbatches=4, **expert_shape(layers=4))
    compare_transformer("dp=2,cp=2,ep=4", microbatches=2, **expert_shape())


def own_all_tokens_choose_one_expert(world):
    """Tests training in which three of four ranks have no rows, and the bytes of this case."""
    changes = expert_shape(top_k=1, layers=1, dense_layers=0, gated=False)
    shape = small_shape(**changes, vocab=12)

    def make_model() -> TransformerModel:
        return crowded_model(shape)

    def make_loss() -> CrossEntropy:
        return CrossEntropy(shape.vocab)

    batch = token_batches(shape)[0]
    compare_model("dp=4,ep=4", make_model, make_loss, [batch])
    run = parallelize(make_model(), Layout.parse("dp=4,ep=4"), loss=make_loss(), optimizer=sgd)
    run.step(*batch)
    counts = 3 * 4 * 8  # to each other rank, the numbers of rows of all experts
    headers = 3 * 4 * 32  # to each other rank, in each of four exchanges of rows
    rows = 2 * shape.positions * shape.hidden * 8  # the tokens of a rank, or their results
    # `ep` and `dp` have the same ranks, so the gradients of other parameters count too
    experts = shape.experts * 2 * shape.hidden * shape.expert_ffn
    gradients = 2 * 3 / 4 * (shape.parameters - experts) * 8
    # forward: each rank sends its rows to rank 0, which returns the results; backward: the reverse
    others = gradients + counts + headers + 2 * rows
    assert run.report().bytes_sent["dp"] == (others + 4 * rows, others, others, others)
    run.mesh.close()


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


def own_float32(world):
    for text in ("dp=2,tp=2,zero=1,sequence_parallel=1", "dp=2,pp=2,zero=3", "cp=2,pp=2"):
        compare_in_float32(text, microbatches=2)
    compare_in_float32("tp=4,tensor=2d")
    compare_in_float32("dp=2,tp=2,ep=4", **expert_shape())


def own_bits_of_gradients_added_in_rank_order(world):
    """Tests that reproducible sums give the bits of one process that adds the ranks' gradients in
    rank order. A ring, in which the order depends on an element's position, gives other bits.
    """
    torch.set_default_dtype(torch.float32)
    try:
        expected = _trained_in_rank_order()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UNISONO_ALGORITHM", "all_reduce=ring;reduce_scatter=ring")
            assert not _has_equal_weights("dp=4", expected)
            patch.setenv("UNISONO_REPRODUCIBLE", "1")
            assert _has_equal_weights("dp=4", expected)
            assert _has_equal_weights("dp=4,zero=1", expected)
    finally:
        torch.set_default_dtype(torch.float64)


def _trained_in_rank_order():
    """Returns a decoder that this process has trained on the parts of all ranks, in rank order."""
    shape = small_shape()
    model, loss = TransformerModel(shape, seed=1), CrossEntropy()
    optimizer = sgd(list(model.parameters()))
    for batch in token_batches(shape):
        valid, totals = int((batch[1] != -100).sum()), []
        for rank in range(RANKS):
            optimizer.zero_grad()
            for number in range(2):
                inputs, targets = (
                    x.tensor_split(2)[number].tensor_split(RANKS)[rank] for x in batch
                )
                share = int((targets != -100).sum()) / valid
                (loss(model(inputs), targets) * share).backward()
            own = [each.grad for each in model.parameters()]
            totals = [a + b for a, b in zip(totals, own, strict=True)] if totals else own
        for each, total in zip(model.parameters(), totals, strict=True):
            each.grad = total
        optimizer.step()
    return model


def _has_equal_weights(text, expected):
    shape = small_shape()
    run = parallelize(
        TransformerModel(shape, seed=1),
        Layout.parse(text),
        loss=CrossEntropy(shape.vocab),
        optimizer=sgd,
        microbatches=2,
    )
    for batch in token_batches(shape):
        run.step(*batch)
    run.mesh.close()
    held = [each for found in run.sets for each in found.held]
    return all(torch.equal(each.values, expected.get_parameter(each.name)) for each in held)


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
            waits = 3 * layout.rules.bubble(layout.pipeline_size(microbatches), 0)
            found = _predicted_bubble(layout, microbatches)
            assert found == pytest.approx(waits / (microbatches + waits), rel=1e-9), layout


def _predicted_bubble(layout, microbatches):
    run = chain(layout, microbatches)
    run.step(torch.ones(microbatches, 3), torch.zeros(microbatches, 3))
    return run.report().predicted.bubble


def own_passes(world):
    run = chain(Layout(dp=2, pp=2, schedule="zb1p"), 4)
    for early in (run.report, run.passes, run.pipeline_schedule):
        with pytest.raises(ValueError, match="expected a step before"):
            early()
    for _ in range(2):
        run.step(torch.ones(8, 3), torch.zeros(8, 3))
    schedule = run.pipeline_schedule()
    assert schedule.ranks == tuple(map(tuple, run.tasks()))
    assert schedule.name == "zb1p" and all(each.weight_gradient_s > 0 for each in schedule.stages)
    steps = simulate_pipeline(schedule, topology.ring(2)).result.steps
    sent = steps.bytes[steps.messages()]
    pipeline = run.mesh.grid.group(0, "pp")
    measured = [run.report().bytes_sent["pp"][rank] for rank in pipeline]
    found = [sum(sent[steps.src[steps.messages()] == place]) for place in (0, 1)]
    assert [found[0] + HEADER_BYTES, found[1]] == measured
    run.mesh.close()
    for schedule, chunks in SCHEDULES:
        stages = max(chunks, 1 + Layout(schedule=schedule).rules.is_v)
        run = chain(Layout(dp=2, pp=2, vpp=chunks, schedule=schedule), 4)
        for _ in range(2):
            run.step(torch.ones(8, 3), torch.zeros(8, 3))
        for measured in compare_passes(run):
            assert _count(measured, "F") == stages * 4
            assert _count(measured, "B") + _count(measured, "I") == stages * 4
            assert _count(measured, "I") == _count(measured, "W"), schedule
            assert (_count(measured, "W") > 0) is (schedule in SPLIT), schedule
        assert 0 < run.passes()["predicted"].bubble < 1
        run.mesh.close()


def _count(tasks, kind):
    return sum(task.kind == kind for task in tasks)
