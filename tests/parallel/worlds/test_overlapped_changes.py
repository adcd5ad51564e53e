"""Sums of gradients while passes run: gradients that become complete in other orders, or
that programs change, and ranks that fail. The ranks act as those of two hosts.
"""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn

from cases_in_turn import turn
from parallel.worlds.layout_training import (
    sgd,
    small_shape,
    token_batches,
    train_alone,
)
from parallel.worlds.overlapped_training import (
    Unsettled,
    a_run,
    batches,
    compare_steps,
    small_buckets,
)
from unisono.parallel import (
    CrossEntropy,
    Layout,
    TransformerModel,
)
from unisono.parallel.run import parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
HOSTS = "abab"


def test_overlapped_changes(outcome):
    outcome.require_success()


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
            for step, batch in enumerate(batches(5)):
                fails[0] = step in (1, 3) and world.rank == 1
                if step in (1, 3):
                    with pytest.raises(RuntimeError, match="a broken layer"):
                        run.step(*batch)
                fails[0] = False
                found.append(float(run.step(*batch)))
            expected, _ = train_alone(alone, nn.functional.mse_loss, batches(5), None)
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
