"""Sums of gradients that run while passes run, on ranks that act as those of two hosts.

The hosts' ranks alternate, so that layouts place ranks in another order than that of their numbers.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import distributed as dist
from torch import nn

from cases_in_turn import turn
from torch_backend.layout_training import (
    SCHEDULES,
    compare_model,
    compare_traced,
    compare_transformer,
    expert_shape,
    sgd,
    small_shape,
    token_batches,
    train_alone,
)
from unisono.parallel import (
    CrossEntropy,
    Layout,
    Precision,
    TrainingMesh,
    TransformerModel,
    training_mesh,
)
from unisono.parallel.run import flat_sets, parallelize
from unisono.parallel.run.overlapped_sums import OverlappedSums
from unisono.timeline.rank_spans import spans_of
from unisono.torch_backend import default_communicator

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
HOSTS = "abab"


def test_overlapped_sums(outcome):
    outcome.require_success()


@contextmanager
def small_buckets(*, everywhere=False):
    """Yields a list that gets, for each bucket, whether its sum began during a backward pass.

    `everywhere`: sums within a host overlap passes, too.
    """
    early = []
    submit = OverlappedSums._submit

    def noted(sums, bucket):
        early.append(sums._in_last_pass)
        submit(sums, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_sets, "_BUCKET_BYTES", 500)
        patch.setattr(OverlappedSums, "_submit", noted)
        if everywhere:
            patch.setattr(TrainingMesh, "overlaps", lambda mesh, name: mesh.layout.zero < 2)
        yield early


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
        for zero in (0, 1):
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


class Unsettled(nn.Module):
    """Layers of which each rank may leave some out, or call them in another order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.unused = nn.Linear(6, 6)
        self.order = [0, 1, 2, 3, 4]

    def forward(self, x):
        parts = [torch.tanh(self.layers[number](x)) for number in self.order]
        return torch.stack(parts).sum(0)


def batches(steps=5):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator))
            for _ in range(steps)]  # fmt: skip


def a_run(model, text="dp=4", **changes):
    torch.set_default_dtype(torch.float64)
    return parallelize(
        model, Layout.parse(text), loss=nn.functional.mse_loss, optimizer=sgd, **changes
    )


def compare_steps(run, model, prepare=lambda module, step: None):
    """Takes steps. Fails if a loss differs from one process, which trains `model`."""
    found = []
    for step, batch in enumerate(batches()):
        prepare(run.stages[0][1], step)
        found.append(float(run.step(*batch)))
    expected, _ = train_alone(model, nn.functional.mse_loss, batches(), None)
    assert found == pytest.approx(expected, rel=1e-12)
    for name, each in run.stages[0][1].named_parameters():
        assert torch.allclose(each, model.get_parameter(name), rtol=1e-11, atol=1e-13), name


def own_gradients_in_another_order_on_each_rank(world):
    torch.set_default_dtype(torch.float64)
    for text in ("dp=4", "dp=4,zero=1"):
        with turn(text=text), small_buckets() as early:
            run = a_run(Unsettled(), text, microbatches=2)

            def prepare(module, step):
                generator = torch.Generator().manual_seed(10 * step + world.rank)
                module.order = torch.randperm(5, generator=generator).tolist()

            compare_steps(run, Unsettled(), prepare)
            assert any(early)
            run.mesh.close()


def own_unused_parameters(world):
    """Each rank leaves out other layers in each step; one layer is never used."""
    torch.set_default_dtype(torch.float64)

    class Part(Unsettled):
        def forward(self, x):
            # in one process, the batch has the rows of all ranks
            rows = x.split(2) if len(x) == 8 else [x]
            first = 0 if len(x) == 8 else self.rank
            found = []
            for number, each in enumerate(rows, start=first):
                used = [n for n in range(5) if n != (number + self.step) % 5]
                found.append(sum(torch.tanh(self.layers[n](each)) for n in used))
            return torch.cat(found)

    for text in ("dp=4", "dp=4,zero=1"):
        with turn(text=text), small_buckets() as early:
            model, alone = Part(), Part()
            model.rank = world.rank
            run = a_run(model, text)
            losses = []
            optimizer = sgd(list(alone.parameters()))
            for step, (inputs, targets) in enumerate(batches()):
                model.step = alone.step = step
                losses.append(float(run.step(inputs, targets)))
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(alone(inputs), targets)
                loss.backward()
                optimizer.step()
                assert losses[-1] == pytest.approx(float(loss.detach()), rel=1e-12)
            for name, each in run.stages[0][1].named_parameters():
                assert torch.allclose(each, alone.get_parameter(name), rtol=1e-11), name
            assert any(early)
            run.mesh.close()


def own_gradients_that_modules_change(world):
    """A hook of a module changes gradients after autograd has computed them, in every step."""
    torch.set_default_dtype(torch.float64)

    made, alone = (nn.Sequential(*(nn.Linear(6, 6) for _ in range(9))) for _ in range(2))
    alone.load_state_dict(made.state_dict())
    for model in (made, alone):
        later = [model[number].weight for number in (4, 8)]

        def changed(*_, later=later):
            for each in later:
                each.grad.mul_(0.5)

        model[3].register_full_backward_hook(changed)
    for each in [*made.parameters(), *alone.parameters()]:
        dist.broadcast(each.detach(), 0)
    with small_buckets() as early:
        run = a_run(made)
        expected = []
        optimizer = sgd(list(alone.parameters()))
        for inputs, targets in batches():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(alone(inputs), targets)
            loss.backward()
            optimizer.step()
            expected.append(float(loss.detach()))
        found = [float(run.step(*batch)) for batch in batches()]
        assert found == pytest.approx(expected, rel=1e-12)
        assert any(early)
        run.mesh.close()


def own_gradients_that_change_in_one_step(world):
    """All ranks refuse the step in which a gradient changes after its sum has begun on one."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    with small_buckets():
        run = a_run(model)
        steps = batches()
        for batch in steps[:2]:
            run.step(*batch)
        before = [each.detach().clone() for each in model.parameters()]

        def changed(module, *_):
            model[3].weight.grad.add_(1.0)

        handle = model[0].register_full_backward_hook(changed) if world.rank == 2 else None
        text = "3.weight: its gradient changed while ranks already summed it"
        with pytest.raises(ValueError, match=text):
            run.step(*steps[2])
        assert all(map(torch.equal, before, model.parameters()))
        if handle is not None:
            handle.remove()
        alone = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        alone.load_state_dict(model.state_dict())
        expected = float(nn.functional.mse_loss(alone(steps[2][0]), steps[2][1]).detach())
        assert float(run.step(*steps[2])) == pytest.approx(expected, rel=1e-12)
        run.mesh.close()


def own_a_failed_rank(world):
    """A rank that fails in its backward pass leaves no rank waiting, and the next step works."""
    torch.set_default_dtype(torch.float64)
    for text in ("dp=4", "dp=4,zero=1", "dp=2,pp=2"):
        with turn(text=text), small_buckets(everywhere=True):
            torch.manual_seed(5)
            layers = [nn.Linear(6, 6) for _ in range(4)]
            alone = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
            alone.load_state_dict(nn.Sequential(*layers).state_dict())
            run = a_run(nn.Sequential(*layers), text, microbatches=2)
            fails = [False]

            def fail(gradient, fails=fails):
                if fails[0]:
                    raise RuntimeError("a broken layer")

            def watch(module, arguments, output):
                output.register_hook(fail)

            own = run.stages[0][1]
            next(each for each in own.modules() if isinstance(each, nn.Linear)
                 ).register_forward_hook(watch)  # fmt: skip
            found = []
            for step, batch in enumerate(batches()):
                fails[0] = step in (1, 3) and world.rank == 1
                if step in (1, 3):
                    with pytest.raises(RuntimeError, match="a broken layer"):
                        run.step(*batch)
                fails[0] = False
                found.append(float(run.step(*batch)))
            expected, _ = train_alone(alone, nn.functional.mse_loss, batches(), None)
            assert found == pytest.approx(expected, rel=1e-12)
            run.mesh.close()


def own_a_failure_between_collectives(world):
    """A rank that fails between collectives of its passes ends the run on all ranks, which may wait
    in sums of gradients."""
    torch.set_default_dtype(torch.float64)
    for text in ("dp=2,tp=2", "dp=2,cp=2,zero=1"):
        with turn(text=text), small_buckets(everywhere=True):
            for attempt in range(2):
                shape = small_shape(layers=2)
                run = parallelize(
                    TransformerModel(shape, seed=1), Layout.parse(text),
                    loss=CrossEntropy(shape.vocab), optimizer=sgd,
                )  # fmt: skip
                ((inputs, targets), *_) = token_batches(shape)
                run.step(inputs, targets)
                run.step(inputs, targets)
                if attempt == 0 and world.rank == 1:

                    def fail(module, *_):
                        raise RuntimeError("a broken layer")

                    next(run.stages[0][1].children()).register_full_backward_hook(fail)
                if attempt == 0:
                    with pytest.raises(Exception, match="a broken layer"):
                        run.step(inputs, targets)
                run.mesh.close()


def own_a_refused_batch(world):
    with small_buckets():
        run = a_run(Unsettled())
        for inputs, targets in batches():
            wrong = inputs[:3] if world.rank == 1 else inputs
            with pytest.raises(ValueError):
                run.step(wrong, targets[:3] if world.rank == 1 else targets)
            run.step(inputs, targets)
        run.mesh.close()


def own_hooks_of_parameters(world):
    torch.set_default_dtype(torch.float64)
    model, alone = Unsettled(), Unsettled()
    for each in (model, alone):
        each.layers[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    with small_buckets() as early:
        run = a_run(model)
        compare_steps(run, alone)
        assert any(early)
        with pytest.raises(ValueError, match="got a hook for its gradient after parallelize"):
            run.stages[0][1].layers[0].weight.register_hook(lambda gradient: gradient)
            run.step(*batches()[0])
        run.mesh.close()


def own_recomputed_layers(world):
    """Reentrant checkpoints add to the gradient of a shared layer several times in a pass."""
    torch.set_default_dtype(torch.float64)

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.first, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.first(x)
            for _ in range(3):
                x = torch.utils.checkpoint.checkpoint(self.layer, x.tanh(), use_reentrant=True)
            return x

    for text in ("dp=4", "dp=4,zero=1"):
        with turn(text=text), small_buckets() as early:
            run = a_run(Shared(), text, microbatches=2)
            compare_steps(run, Shared())
            assert any(early)
            run.mesh.close()


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
                for inputs, targets in batches(3):
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
    assert placed.mesh.grid.placed == (0, 2, 1, 3) and len(placed.sets[0].buckets) > 1
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
            "dp=4,zero=1", Unsettled, lambda: nn.functional.mse_loss, batches(3), clip=None
        )
