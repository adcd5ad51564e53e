"""Checkpoints of other models and optimizers, and the hyperparameters in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases_in_turn import turn
from parallel.worlds.layout_training import small_shape, token_batches, train_alone
from parallel.worlds.test_layout_checkpoint import adam, shared_folder
from unisono.parallel import Layout
from unisono.parallel.layers import CrossEntropy, TransformerModel
from unisono.parallel.run import ParallelRun, parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)


def test_checkpoint_refusals(outcome):
    outcome.require_success()


def a_run(text: str, make_optimizer=adam, *, model=None, **changes) -> ParallelRun:
    torch.set_default_dtype(torch.float64)
    shape = small_shape(**changes)
    return parallelize(
        TransformerModel(shape, seed=1) if model is None else model,
        Layout.parse(text),
        loss=CrossEntropy(shape.vocab),
        optimizer=make_optimizer,
        microbatches=4,
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def rmsprop(parameters):
    return torch.optim.RMSprop(parameters, 0.01)


def amsgrad(parameters):
    return torch.optim.AdamW(parameters, 1e-2, amsgrad=True)


def own_other_models_and_optimizers_are_refused_before_a_change(world):
    batches = token_batches(small_shape())
    folders = {}
    for name, make_optimizer, changes in (
        ("adam", adam, {}),
        ("sgd", sgd, {}),
        ("momentum", momentum, {}),
        ("3 layers", adam, {"layers": 3}),
        ("5 layers", adam, {"layers": 5}),
        ("wider", adam, {"hidden": 32}),
    ):
        run = a_run("dp=4", make_optimizer, **changes)
        run.step(*batches[0])
        folders[name] = shared_folder()
        run.save(folders[name])
        run.mesh.close()
    lacks = "expected the optimizer states"
    for text in ("dp=4,zero=1", "dp=2,pp=2,zero=3"):
        for make_optimizer, name, message in (
            (adam, "3 layers", r"has no tensor 'layer3\.\w"),
            (adam, "5 layers", r"has 'layer4\.\w.*, which this model does not have"),
            (adam, "wider", r"embedding\.weight: expected the shape \(11, 24\), got \(11, 32\)"),
            (adam, "momentum", rf"{lacks} exp_avg, exp_avg_sq, step, got momentum_buffer"),
            (adam, "sgd", rf"{lacks} exp_avg, exp_avg_sq, step, got none"),
            (sgd, "momentum", rf"{lacks} none, got momentum_buffer"),
            (momentum, "sgd", rf"{lacks} momentum_buffer, got none"),
            (rmsprop, "adam", rf"{lacks} square_avg, step, got exp_avg, exp_avg_sq, step"),
            (amsgrad, "adam", rf"{lacks} exp_avg, exp_avg_sq, max_exp_avg_sq, step, got exp_avg"),
        ):
            with turn(text=text, name=name):
                model = TransformerModel(small_shape(), seed=1)
                expected, _ = train_alone(model, CrossEntropy(), batches[:2], None, make_optimizer)
                run = a_run(text, make_optimizer)
                with pytest.raises(ValueError, match=message) as caught:
                    run.load(folders[name])
                assert "\n" not in str(caught.value)
                assert len(str(caught.value)) < 600
                losses = [float(run.step(*batch)) for batch in batches[:2]]
                assert losses == pytest.approx(expected, rel=1e-11)
                assert run.steps == 2
                run.mesh.close()


def scheduled(rate):
    """Returns a maker of AdamW with two groups of parameters and two rates."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [each for each in parameters if each.dim() > 1]
        others = [each for each in parameters if each.dim() == 1]
        groups = [{"params": others, "lr": rate / 2}, {"params": matrices, "weight_decay": rate}]
        return torch.optim.AdamW(
            [each for each in groups if each["params"]], lr=rate, betas=(0.8, 0.9), eps=1e-3
        )

    return make


def own_hyperparameters(world):
    """Tests that a checkpoint restores the rates that a scheduler has set, and other values."""
    torch.set_default_dtype(torch.float64)
    batches = 2 * token_batches(small_shape())  # the third loss depends on the rates that were read
    model = TransformerModel(small_shape(), seed=1)
    made = []

    def make_once(parameters):
        made.append(scheduled(0.02)(parameters) if not made else made[0])
        return made[0]

    expected = train_alone(model, CrossEntropy(), batches[:1], None, make_once)[0]
    torch.optim.lr_scheduler.ExponentialLR(made[0], 0.5).step()
    expected += train_alone(model, CrossEntropy(), batches[1:], None, make_once)[0]
    for source, target in (("dp=4,zero=1", "pp=4"), ("pp=4", "dp=2,tp=2,zero=3")):
        with turn(source=source, target=target):
            folder = shared_folder()
            first = a_run(source, scheduled(0.02))
            scheduler = torch.optim.lr_scheduler.ExponentialLR(first.optimizer, 0.5)
            losses = [float(first.step(*batches[0]))]
            scheduler.step()
            first.save(folder)
            run = a_run(target, scheduled(0.3))
            for group in run.optimizer.param_groups:
                group["betas"], group["eps"] = (0.1, 0.2), 1.0
            run.load(folder)
            losses += [float(run.step(*batch)) for batch in batches[1:]]
            assert losses == pytest.approx(expected, rel=1e-11)
            for group in run.optimizer.param_groups:
                assert isinstance(group["betas"], tuple)
            first.mesh.close()
            run.mesh.close()
    one = a_run("dp=4", adam)
    with pytest.raises(
        ValueError, match=r"group 0 of the optimizer: expected one \w*lr, got 0\.\d"
    ):
        one.load(folder)
    one.mesh.close()
