"""Hooks of parameters: a run calls them as one process does, or refuses them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model
from parallel.worlds.test_foreign_parameters import WIDTH, a_run, batches, refused, small_model
from parallel.worlds.test_unused_parameters import Gate

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)


def test_gradient_hooks(outcome):
    outcome.require_success()


def masked(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (torch.arange(gradient.numel()).view_as(gradient) % 2)


def clipped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.02, 0.02)


def normed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / (gradient.norm() + 0.1) + 0.01


def halved_afterwards(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad.clamp(-0.01, 0.01)


def hooked(*hooks: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    def make_model() -> nn.Module:
        model = small_model()
        for each in (model[0].weight, model[2].bias, model[3].weight):
            for hook in hooks:
                each.register_hook(hook)
            each.register_post_accumulate_grad_hook(halved_afterwards)
        return model

    return make_model


def own_hooks_are_called_with_the_gradient_of_the_batch(world):
    for text in ("dp=2", "pp=2"):
        for hooks in ((masked,), (clipped, normed)):
            with turn(text=text, hooks=[each.__name__ for each in hooks]):
                compare_model(
                    text,
                    hooked(*hooks),
                    lambda: functional.mse_loss,
                    batches(),
                    microbatches=2,
                    clip=0.01,
                    unpredicted=("pp",),
                )


def own_hooks_of_unused_parameters_are_not_called(world):
    """Tests parameters that one rank, and no rank, uses in a step."""

    def gates() -> nn.Module:
        torch.manual_seed(4)
        made = nn.Sequential(*(Gate(None) for _ in range(2)), nn.Linear(WIDTH, WIDTH))
        for gate in made[:2]:
            gate.extra.register_hook(normed)
            gate.never.register_hook(normed)
        return made

    found = batches()
    for step, (inputs, _) in enumerate(found):
        inputs[:, -1] = 0
        inputs[4:, -1] = float(step != 1)
    compare_model("dp=2", gates, lambda: functional.mse_loss, found, clip=0.01)


def own_a_failed_step_calls_no_hook(world):
    """Tests that all ranks learn the error of one rank, and that hooks see whole batches only."""
    calls = []
    model = small_model()
    model[0].weight.register_hook(lambda gradient: calls.append(float(gradient.norm())))
    run = a_run("dp=2", model)
    inputs, targets = batches()[0]
    with pytest.raises(ValueError, match="inputs: expected a tensor"):
        run.step(inputs.tolist() if world.rank == 1 else inputs, targets)
    assert not calls
    run.step(inputs, targets)
    assert len(calls) == 1
    run.mesh.close()


def own_a_hook_that_fails_on_one_rank(world):
    """Tests hooks that raise on one rank, or on the one stage with their parameter."""
    for text, name, failing in (("dp=2", "0.weight", 1), ("pp=2", "0.weight", 0),
                                ("pp=2", "3.weight", 1)):  # fmt: skip
        for kind in ("register_hook", "register_post_accumulate_grad_hook"):
            with turn(text=text, name=name, kind=kind):
                model, is_bad = small_model(), [False]

                def hook(_, is_bad=is_bad, failing=failing):
                    if is_bad[0] and world.rank == failing:
                        raise KeyError("no value")

                getattr(model.get_parameter(name), kind)(hook)
                model[2].bias.register_hook(masked)
                run = a_run(text, model)
                run.step(*batches()[0])
                is_bad[0] = True
                with pytest.raises((KeyError, RuntimeError)) as caught:
                    run.step(*batches()[1])
                if world.rank == failing:
                    assert type(caught.value) is KeyError
                else:
                    assert f"rank {failing} could not take this step" in str(caught.value)
                is_bad[0] = False
                run.step(*batches()[1])
                run.mesh.close()


def own_a_handle_removes_a_hook(world):
    model = small_model()
    calls = []
    handle = model[0].weight.register_hook(lambda gradient: calls.append(gradient.shape))
    run = a_run("dp=2", model)
    for batch in batches()[:2]:
        run.step(*batch)
    assert calls == [(WIDTH, WIDTH)] * 2
    handle.remove()
    run.step(*batches()[2])
    assert len(calls) == 2
    run.mesh.close()


def own_refused_hooks(world):
    for text, cure in (
        ("dp=2,zero=1", "zero = 0"),
        ("dp=2,zero=2", "zero = 0"),
        ("dp=2,zero=3", "zero = 0"),
        ("tp=2", "dp = 2"),
    ):
        with turn(text=text):
            message = f"0.weight: has a hook for its gradient.* {cure} works"
            refused(message, lambda text=text: a_run(text, hooked(masked)()))

    def removing(parameter: nn.Parameter) -> None:
        parameter.grad = None

    def stepping(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    for hook in (removing, stepping):
        model = small_model()
        model[0].weight.register_post_accumulate_grad_hook(hook)
        refused("changed the parameter or removed its", lambda model=model: a_run("dp=2", model))
    noisy = small_model()
    noisy[2].weight.register_hook(lambda gradient: gradient + 0.1 * world.rank)
    refused("2.weight: a hook returned different gradients", lambda: a_run("dp=2", noisy))


def own_hooks_after_parallelize(world):
    for text in ("dp=2", "dp=2,zero=3", "pp=2"):
        with turn(text=text):
            run = a_run(text)
            run.step(*batches()[0])
            if world.rank == 0:
                next(iter(run.stages[0][1].parameters())).register_hook(clipped)
            with pytest.raises(ValueError, match=r"0\.weight: got a hook"):
                run.step(*batches()[1])
            run.mesh.close()


def own_hooks_of_divided_modules(world):
    """Tests that a hook of a linear layer of a pair sees the whole result."""

    def make_model() -> nn.Module:
        model = small_model()
        torch.manual_seed(5)
        pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        model[0].register_forward_hook(lambda _, inputs, result: functional.normalize(result))
        return nn.Sequential(pair, *model)

    compare_model(
        "tp=2", make_model, lambda: functional.mse_loss, batches(), clip=None, unpredicted=("tp",)
    )
    hooked_only = small_model()
    hooked_only[1].register_forward_hook(lambda _, inputs, result: functional.normalize(result))
    refused(r"found nothing to divide.*\(1 has hooks\)", lambda: a_run("tp=2", hooked_only))
