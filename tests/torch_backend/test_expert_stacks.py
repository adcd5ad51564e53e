"""Stacked experts of any module over the ranks of `ep`: equal to one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases_in_turn import turn
from torch_backend.stacked_experts import (
    CountedExperts,
    EqualExperts,
    ListedExperts,
    MixtureDecoder,
    NestedExperts,
    SortingExperts,
    StackedExperts,
)
from torch_backend.test_tensor_plan import a_run, batches, compare

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)


def test_expert_stacks(outcome):
    outcome.require_success()


def own_decoders(world):
    for text, later in (
        ("dp=4,ep=2", "dp=4,ep=4"),
        ("dp=4,ep=4,zero=1", "dp=4,zero=3"),
        ("dp=4,ep=2,zero=3", "dp=2,tp=2,ep=2"),
        ("dp=4,ep=2,zero=2,dp_replicate=2", "dp=4"),
    ):
        with turn(text=text):
            compare(MixtureDecoder, text, later=later)


def own_ranks_with_equal_tokens(world):
    for text in ("dp=2,tp=2,ep=2", "dp=2,tp=2,ep=4,zero=1", "tp=4,ep=4", "dp=2,tp=2,ep=2,zero=3"):
        with turn(text=text):
            compare(MixtureDecoder, text, later="dp=4,ep=2,zero=1")


def own_other_calls_of_experts(world):
    make = partial(MixtureDecoder, ListedExperts, CountedExperts, EqualExperts, NestedExperts)
    for text in ("dp=4,ep=4", "dp=4,ep=2,zero=3", "tp=4,ep=2"):
        with turn(text=text):
            compare(make, text, later="dp=2,tp=2,ep=4")


def own_pipelines_of_sequences(world):
    def make() -> nn.Module:
        whole = MixtureDecoder()
        return nn.Sequential(whole.embed_tokens, *whole.layers, whole.lm_head)

    compare(make, "dp=2,pp=2,ep=2", later="dp=4,ep=4")


def own_ranks_without_tokens(world):
    """Tests experts that no token chooses: their weights decay as in one process."""

    def make(is_tied: bool) -> nn.Module:
        made = MixtureDecoder()
        for layer in made.layers:
            nn.init.zeros_(layer.mlp.router.weight)
            nn.init.zeros_(layer.mlp.router.bias)
            layer.mlp.router.bias.requires_grad_(not is_tied)
            layer.mlp.router.weight.requires_grad_(not is_tied)
            if not is_tied:
                layer.mlp.router.bias.data[2:] = 50.0
        return made

    for text in ("dp=4,ep=4", "dp=4,ep=2,zero=3"):
        for is_tied in (False, True):
            with turn(text=text, is_tied=is_tied):
                compare(partial(make, is_tied), text)


def own_frozen_parameters(world):
    def make(*trained: str) -> nn.Module:
        made = MixtureDecoder()
        for name, each in made.named_parameters():
            each.requires_grad_(any(part in name for part in trained))
        return made

    for trained in (("mlp.experts",), ("self_attn", "router"), ("lm_head",), ("layers.1.mlp.exp",)):
        for text in ("dp=4,ep=2,zero=1", "dp=2,tp=2,ep=2,zero=3"):
            with turn(trained=trained, text=text):
                compare(partial(make, *trained), text)


def own_shared_experts(world):
    def make(is_module: bool) -> nn.Module:
        made = MixtureDecoder(StackedExperts, StackedExperts, SortingExperts)
        first, second = made.layers[0].mlp, made.layers[1].mlp
        if is_module:
            second.experts = first.experts
        else:
            second.experts.down_proj = first.experts.down_proj
        return made

    for is_module in (False, True):
        with turn(is_module=is_module):
            compare(partial(make, is_module), "dp=4,ep=2", later="dp=4,ep=4")


def own_checkpoints_of_activations(world):
    def make(is_reentrant: bool) -> nn.Module:
        made = MixtureDecoder()
        for each in made.layers:
            each.forward = partial(checkpoint, each.forward, use_reentrant=is_reentrant)
        return made

    compare(partial(make, False), "dp=4,ep=2,zero=3", is_predicted=False)
    compare(partial(make, True), "dp=4,ep=2", is_predicted=False)


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


def own_modules_show_the_number_of_experts(world):
    made = MixtureDecoder()
    run = a_run(made, "dp=4,ep=2")
    run.step(*batches()[0])
    experts = made.layers[0].mlp.experts
    assert experts.num_experts == 4 and experts.down_proj.shape[0] == 2
    run.mesh.close()


def own_unknown_experts_end_the_step_on_all_ranks(world):
    class Unknown(StackedExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return super().forward(hidden_states, top_k_index, top_k_weights)

    made = MixtureDecoder(Unknown)
    router, is_last = made.layers[0].mlp.router, dist.get_rank() == 3
    run = a_run(made, "dp=4,ep=2")
    router.forward = lambda x, plain=router.forward: nn.functional.pad(
        plain(x), (0, 1), value=100.0 if is_last else -100.0
    )
    with pytest.raises((ValueError, RuntimeError), match="experts from 0 to 3, got 4") as caught:
        run.step(*batches()[0])
    assert "\n" not in str(caught.value)
    run.mesh.close()


def own_traced_pipelines_are_refused(world):
    with pytest.raises(ValueError, match="a graph cannot contain layers.0.mlp.experts") as caught:
        a_run(MixtureDecoder(), "dp=2,pp=2,ep=2", example=batches()[0][0])
    assert "ep = 1, pp = 1 or" in str(caught.value) and "\n" not in str(caught.value)


def own_optimizers_of_whole_parameters_are_refused(world):
    from unisono.parallel import Layout, parallelize
    from unisono.parallel.layers import CrossEntropy

    with pytest.raises(ValueError, match="Adafactor.*ep"):
        parallelize(
            MixtureDecoder(), Layout(dp=4, ep=2), loss=CrossEntropy(13),
            optimizer=torch.optim.Adafactor,
        )  # fmt: skip
