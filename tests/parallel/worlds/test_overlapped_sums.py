"""Sums of gradients that run while passes run, on ranks that act as those of two hosts.

The hosts' ranks alternate, so that layouts place ranks in another order than that of their numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases_in_turn import turn
from parallel.worlds.layout_training import (
    SCHEDULES,
    compare_model,
    compare_traced,
    compare_transformer,
    expert_shape,
    sgd,
    small_shape,
    token_batches,
)
from parallel.worlds.overlapped_training import (
    Unsettled,
    a_run,
    batches,
    small_buckets,
)
from unisono.parallel import (
    CrossEntropy,
    Layout,
    Precision,
    TrainingMesh,
    TransformerModel,
    training_mesh,
)
from unisono.parallel.run import parallelize
from unisono.timeline.rank_spans import spans_of
from unisono.torch_backend import default_communicator

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
HOSTS = "abab"


def test_overlapped_sums(outcome):
    outcome.require_success()


def own_sums_begin_in_the_order_of_the_backward_pass(world):
    """After the first step, all buckets but the last begin before the pass ends."""
    torch.set_default_dtype(torch.float64)
    for text in ("dp=4", "dp=4,zero=1"):
        with turn(text=text), small_buckets() as early:
            run = a_run(nn.Sequential(*(nn.Linear(6, 6) for _ in range(9))), text, microbatches=2)
            for step, batch in enumerate(batches()):
                early.clear()
                run.step(*batch)
                assert len(early) == 6
                assert early == ([True] * 6 if step else [False] * 6)
            run.mesh.close()


def own_layouts_equal_one_process(world):
    for text, changes in (
        ("dp=4", {"microbatches": 2}),
        ("dp=4,zero=1", {"microbatches": 2}),
        ("dp=4,zero=1,dp_replicate=2", {}),
        ("dp=2,tp=2", {}),
        ("dp=2,tp=2,zero=1,sequence_parallel=1", {}),
        ("dp=2,cp=2,zero=1", {}),
        ("cp=4", {"positions": 16}),
        ("dp=4,ep=2", expert_shape()),
        ("dp=2,tp=2,ep=2", expert_shape()),
    ):
        with turn(text=text), small_buckets() as early:
            compare_transformer(text, **changes)
            assert any(early), "no sum began during a pass"


def own_pipelines_equal_one_process(world):
    for schedule, chunks in SCHEDULES:
        for zero in (0, 1) if schedule in ("1f1b", "zbv") else (1,):
            text = f"dp=2,pp=2,vpp={chunks},schedule={schedule},zero={zero}"
            with turn(text=text), small_buckets(everywhere=True) as early:
                compare_transformer(text, microbatches=4, layers=6, hidden=8, heads=2)
                assert early
    with turn(text="traced"), small_buckets(everywhere=True):
        compare_traced("dp=2,pp=2", microbatches=2)


def own_torchs_sums_stay(world):
    for text in ("dp=4,zero=2", "dp=2,tp=2,zero=3", "dp=2,pp=2,zero=3"):
        with turn(text=text), small_buckets() as early:
            compare_transformer(text, microbatches=2)
            assert not any(early)


def own_places_by_host(world):
    if not training_mesh._can_be_unsorted():
        pytest.skip("this torch makes no groups of ranks in any order")
    mesh = TrainingMesh(Layout(dp=2, tp=2))
    assert mesh.ranks("tp") == ((0, 2), (1, 3))[world.rank % 2]
    assert mesh.explain() == "tp: within a host\ndp: between hosts\norder of the ranks: 0 2 1 3"
    mesh.close()
    mesh = TrainingMesh(Layout(cp=2, pp=2))
    assert mesh.explain() == "cp: within a host\npp: between hosts\norder of the ranks: 0 2 1 3"
    mesh.close()
    with pytest.MonkeyPatch.context() as patch:  # torch before 2.13
        patch.setattr(training_mesh, "_can_be_unsorted", lambda: False)
        mesh = TrainingMesh(Layout(dp=2, tp=2))
        assert mesh.explain() == "tp: between hosts\ndp: within a host"
        mesh.close()
    mesh = TrainingMesh(Layout(dp=4))
    assert mesh.explain() == "dp: between hosts" and mesh.ranks("dp") == (0, 1, 2, 3)
    mesh.close()


def own_narrow_sums(world):
    """Sums in another type than that of the weights have the bits of one sum at once."""
    torch.set_default_dtype(torch.float32)
    weights = []
    try:
        for overlap in (True, False):
            torch.manual_seed(4)
            model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
            with small_buckets():
                run = parallelize(
                    model, Layout(dp=4, zero=1), loss=nn.functional.mse_loss, optimizer=sgd,
                    precision=Precision(reduction=torch.float64), overlap=overlap,
                )  # fmt: skip
                for inputs, targets in batches():
                    run.step(inputs.float(), targets.float())
            weights.append([each.detach().clone() for each in model.parameters()])
            run.mesh.close()
    finally:
        torch.set_default_dtype(torch.float64)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*weights, strict=True))


def own_checkpoints_of_other_places_and_buckets(world):
    """A checkpoint of placed ranks with many buckets goes on in another layout with one bucket."""
    torch.set_default_dtype(torch.float64)
    shape = small_shape(layers=2)
    inputs, targets = token_batches(shape)[0]

    def made(text, **options):
        return parallelize(
            TransformerModel(shape, seed=1), Layout.parse(text), loss=CrossEntropy(shape.vocab),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2), **options,
        )  # fmt: skip

    with small_buckets():
        placed = made("dp=2,tp=2,zero=1")
    assert placed.mesh.grid.placed == (0, 2, 1, 3) or not training_mesh._can_be_unsorted()
    assert placed.mesh.grid.placed == (0, 1, 2, 3) or len(placed.sets[0].buckets) > 1
    for _ in range(3):
        placed.step(inputs, targets)
    placed.save(world.folder / "placed")
    expected = [float(placed.step(inputs, targets)) for _ in range(3)]
    placed.mesh.close()
    for text, options in (("dp=4,zero=1", {"overlap": False}), ("pp=2,tp=2", {"microbatches": 2})):
        with turn(text=text):
            run = made(text, **options)
            run.load(world.folder / "placed")
            found = [float(run.step(inputs, targets)) for _ in range(3)]
            assert found == pytest.approx(expected, rel=1e-11)
            run.mesh.close()


def own_wrong_arguments(world):
    with pytest.raises(ValueError, match="overlap: expected True, False or None, got 'yes'"):
        a_run(Unsettled(), overlap="yes")
    with pytest.raises(ValueError, match="one overlap on all ranks, got True on rank 0 and None"):
        a_run(Unsettled(), overlap=True if world.rank == 0 else None)


def own_evaluations_between_steps(world):
    with small_buckets():
        run = a_run(Unsettled(), "dp=4,zero=1")
        for batch in batches():
            before = float(run.evaluate(*batch))
            assert float(run.step(*batch)) == pytest.approx(before, rel=1e-12)
        run.mesh.close()


def own_sums_in_the_timeline(world):
    timeline = default_communicator().timeline
    with small_buckets():
        run = a_run(Unsettled())
        begin = timeline.now_ns()
        for batch in batches():
            run.step(*batch)
        count = sum(len(each.buckets) for each in run.sets)
        report = run.report()
        run.mesh.close()
    spans = spans_of(timeline.dump())
    sums = [
        each for each in spans.collectives
        if "gradients" in each.tensors and each.launched_ns >= begin
    ]  # fmt: skip
    assert count > 2 and len(sums) == len(batches()) * count
    assert all(each.moved is not None and each.ran for each in sums)
    own, hidden = report.exposed_s[world.rank], report.hidden_s[world.rank]
    moved = sum(each.moved.ended_ns - each.moved.begun_ns for each in sums[-count:]) / 1e9
    assert hidden >= 0 and own > 0 and own + hidden >= moved
    assert report.placement == "dp: between hosts"


def own_compared_models_with_ties(world):
    with small_buckets(everywhere=True):
        compare_transformer("dp=2,pp=2", microbatches=2, tied=True)
        torch.set_default_dtype(torch.float64)
        compare_model(
            "dp=4,zero=1", Unsettled, lambda: nn.functional.mse_loss, batches(), clip=None
        )
