"""Stacked experts of any module over the ranks of `ep`: equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model
from parallel.worlds.planned_models import VOCAB
from parallel.worlds.stacked_experts import (
    CountedExperts,
    EqualExperts,
    ListedExperts,
    MixtureDecoder,
    NestedExperts,
    SortingExperts,
    StackedExperts,
)
from parallel.worlds.test_tensor_plan import a_run, adamw, batches, compare
from unisono.parallel.layers import CrossEntropy

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)


def test_expert_stacks(outcome):
    outcome.require_success()


def train(make: Callable[[], nn.Module], text: str, **options: object) -> None:
    """Fails if losses, norms, weights or bytes of a run differ from those that are expected."""
    compare_model(text, make, lambda: CrossEntropy(VOCAB), batches()[:2], microbatches=2, **options)


def own_checkpoints_exports_and_evaluations(world):
    compare(MixtureDecoder, "dp=4,ep=2,zero=3", later="dp=2,tp=2,ep=4", returns=True)


def own_ranks_with_different_tokens(world):
    for text in ("dp=4,ep=4", "dp=4,ep=2,zero=1", "dp=4,ep=2,zero=2,dp_replicate=2"):
        with turn(text=text):
            train(MixtureDecoder, text)


def own_ranks_with_equal_tokens(world):
    for text in ("dp=2,tp=2,ep=2,zero=3", "dp=2,tp=2,ep=4,zero=1", "tp=4,ep=4"):
        with turn(text=text):
            train(MixtureDecoder, text)


def own_other_calls_of_experts(world):
    make = partial(MixtureDecoder, ListedExperts, CountedExperts, EqualExperts, NestedExperts)
    for text in ("dp=4,ep=4", "tp=4,ep=2,zero=3"):
        with turn(text=text):
            train(make, text)


def own_divided_sequences(world):
    data = [
        tuple(torch.cat([each, each[:, :2]], dim=1) for each in batch) for batch in batches()[:2]
    ]  # 8 positions
    for text in ("dp=2,cp=2,ep=4", "cp=2,dp=2,ep=2,zero=3"):
        with turn(text=text):
            compare_model(
                text, MixtureDecoder, lambda: CrossEntropy(VOCAB), data, unpredicted=("cp",)
            )


def own_pipelines_of_sequences(world):
    def make() -> nn.Module:
        whole = MixtureDecoder(StackedExperts, SortingExperts)
        return nn.Sequential(whole.embed_tokens, *whole.layers, whole.lm_head)

    train(make, "dp=2,pp=2,ep=2")


def own_pipelines_of_blocks(world):
    example = batches()[0][0]
    for text in ("dp=2,pp=2,ep=2", "pp=2,tp=2,ep=2"):
        with turn(text=text):
            train(MixtureDecoder, text, example=example, unpredicted=("pp",))


def own_ranks_without_tokens(world):
    """Tests experts that no token chooses: their weights decay as in one process."""

    def make(is_tied: bool) -> nn.Module:
        made = MixtureDecoder()
        for layer in made.layers:
            nn.init.zeros_(layer.mlp.router.weight).requires_grad_(not is_tied)
            nn.init.zeros_(layer.mlp.router.bias).requires_grad_(not is_tied)
            if not is_tied:
                layer.mlp.router.bias.data[2:] = 50.0
        return made

    for text, is_tied in (("dp=4,ep=4", False), ("dp=4,ep=2,zero=3", True), ("tp=4,ep=4", True)):
        with turn(text=text, is_tied=is_tied):
            train(partial(make, is_tied), text, make_optimizer=adamw)


def own_frozen_parameters(world):
    def make(*trained: str) -> nn.Module:
        made = MixtureDecoder()
        for name, each in made.named_parameters():
            each.requires_grad_(any(part in name for part in trained))
        return made

    for text, *trained in (
        ("dp=4,ep=2,zero=1", "mlp.experts"),
        ("dp=2,tp=2,ep=2", "self_attn", "router"),
        ("dp=4,ep=2,zero=3", "self_attn", "layers.0.mlp.experts"),
        ("dp=2,tp=2,ep=4", "lm_head"),
    ):
        with turn(trained=trained, text=text):
            train(partial(make, *trained), text)


def own_shared_experts(world):
    def make(is_module: bool) -> nn.Module:
        made = MixtureDecoder(StackedExperts, StackedExperts)
        first, second = made.layers[0].mlp, made.layers[1].mlp
        if is_module:
            second.experts = first.experts
        else:
            second.experts.down_proj = first.experts.down_proj
        return made

    gathers = ("expert_tokens",)  # of a module that a pass calls twice
    for text, unpredicted in (("dp=4,ep=2", ()), ("dp=4,ep=2,zero=3", gathers)):
        for is_module in (False, True):
            with turn(text=text, is_module=is_module):
                train(partial(make, is_module), text, unpredicted=unpredicted)
    train(partial(make, True), "dp=4,zero=3")


def own_checkpoints_of_activations(world):
    def make(is_reentrant: bool) -> nn.Module:
        made = MixtureDecoder()
        for each in made.layers:
            each.forward = partial(checkpoint, each.forward, use_reentrant=is_reentrant)
        return made

    train(partial(make, False), "dp=4,ep=2")
    train(partial(make, True), "dp=4,ep=2,zero=1", unpredicted=("ep",))


def own_hooks_see_the_tokens_of_a_rank(world):
    made, seen = MixtureDecoder(StackedExperts), []
    made.layers[0].mlp.experts.register_forward_hook(
        lambda _, inputs, result: seen.append((tuple(inputs[0].shape), tuple(result.shape)))
    )
    run = a_run(made, "dp=4,ep=2")
    tokens, targets = batches()[0]
    run.step(tokens, targets)
    run.mesh.close()
    rows = (len(tokens) // 4 * tokens.shape[1], 24)
    assert seen == [(rows, rows)]


def own_figures_of_a_step(world):
    run = a_run(MixtureDecoder(), "dp=4,ep=2")
    run.step(*batches()[0])
    run.evaluate(*batches()[1])
    report = run.report()
    assert report.bytes_sent == report.predicted.bytes_sent
    for kind, values in report.memory.items():
        assert values == pytest.approx(report.predicted.memory[kind]), kind
    run.mesh.close()


def own_modules_show_the_number_of_experts(world):
    made = MixtureDecoder()
    run = a_run(made, "dp=4,ep=2")
    run.step(*batches()[0])
    experts = made.layers[0].mlp.experts
    assert experts.num_experts == 4 and experts.down_proj.shape[0] == 2
    run.mesh.close()


def refused_in_a_step(made: nn.Module, pattern: str) -> None:
    run = a_run(made, "dp=4,ep=2")
    with pytest.raises((ValueError, RuntimeError), match=pattern) as caught:
        run.step(*batches()[0])
    assert "\n" not in str(caught.value)
    run.mesh.close()


def own_unknown_experts_end_the_step_on_all_ranks(world):
    made = MixtureDecoder(StackedExperts)
    router, is_last = made.layers[0].mlp.router, dist.get_rank() == 3
    router.forward = lambda x, plain=router.forward: nn.functional.pad(
        plain(x), (0, 1), value=100.0 if is_last else -100.0
    )
    refused_in_a_step(made, "experts: expected numbers of experts from 0 to 3, got 4")


def own_other_arguments_end_the_step_on_all_ranks(world):
    made = MixtureDecoder(StackedExperts)
    experts = made.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda _, inputs: (inputs[0], inputs[2], inputs[1]))
    refused_in_a_step(
        made, r"experts: was called with float\d\d \(12, 24\), float\d\d \(12, 2\), int64 \(12, 2\)"
    )
