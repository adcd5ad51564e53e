"""Stacked experts of any module: what is found, and what is refused before anything is changed."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from parallel.worlds.planned_models import WIDTH
from parallel.worlds.stacked_experts import (
    BiasedExperts,
    CountedExperts,
    EqualExperts,
    ListedExperts,
    Mixture,
    MixtureDecoder,
    NestedExperts,
    SortingExperts,
    StackedExperts,
)
from unisono.parallel import Layout, plan
from unisono.parallel.expert_stacks.call_forms import ChosenForm, EqualForm, SortedForm
from unisono.parallel.layers import TransformerModel
from unisono.planner import Transformer

pytestmark = pytest.mark.torch
EP2 = Layout(dp=2, ep=2)


def refused(model: nn.Module, pattern: str, layout: Layout = EP2, **options: object) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=pattern) as caught:
        plan(model, layout, **options)
    assert "\n" not in str(caught.value)
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name])


def test_plans_show_stacked_experts() -> None:
    model = MixtureDecoder(StackedExperts, StackedExperts, BiasedExperts)
    found = plan(model, EP2)
    assert [each.name for each in found.experts] == [f"layers.{n}.mlp.experts" for n in range(3)]
    head, columns, *rows = str(found).splitlines()
    assert head == "MixtureDecoder with dp2 ep2"
    assert columns.endswith("on rank 0 of ep")
    (row,) = (each for each in rows if each.startswith("layers.*.mlp.experts x 2"))
    assert "experts  gate_up_proj: 2 of 4; down_proj: 2 of 4" in row
    nbytes = 2 * 4 * 3 * 10 * WIDTH * torch.get_default_dtype().itemsize
    assert row.split()[-2:] == [f"{nbytes:,}", f"{nbytes // 2:,}"]
    (row,) = (each for each in rows if each.startswith("layers.*.mlp.experts x 1"))
    assert "up: 2 of 4; up_bias: 2 of 4; down: 2 of 4; scale: 2 of 4" in row
    whole = sum(each.nbytes for each in model.parameters())
    stacks = [
        each
        for name, each in model.named_parameters()
        if "mlp.experts" in name and "norm" not in name
    ]
    kept = whole - sum(each.nbytes for each in stacks) // 2
    assert rows[-1].split() == ["all", "parameters", f"{whole:,}", f"{kept:,}"]
    assert str(plan(model, Layout(dp=1, tp=2, ep=2))).splitlines()[1].endswith("of tp and ep")


def test_plans_change_nothing() -> None:
    model = MixtureDecoder()
    state, attributes = torch.get_rng_state(), dict(vars(model.layers[0].mlp.experts))
    plan(model, EP2)
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(model.layers[0].mlp.experts) == attributes
    assert model.training and model.layers[1].mlp.experts.training
    assert plan(model, Layout(dp=2)).experts == ()


def test_the_calls_of_experts_are_found() -> None:
    stacked, biased, sorting = plan(MixtureDecoder(), EP2).experts
    assert stacked.counts == sorting.counts == ("num_experts",)
    assert stacked.forms == sorting.forms == (ChosenForm(),)
    assert biased.forms == (ChosenForm(is_last=True), ChosenForm(is_last=True, is_nested=True))
    assert biased.parameters == ("up", "up_bias", "down", "scale")
    assert biased.counts == ("experts",)
    kinds = {
        ListedExperts: SortedForm(),
        CountedExperts: SortedForm(is_list=False),
        EqualExperts: EqualForm(),
        NestedExperts: EqualForm(is_nested=True),
    }
    found = plan(MixtureDecoder(*kinds), EP2).experts
    assert [each.forms for each in found] == [(form,) for form in kinds.values()]


def test_styles_keep_experts_whole() -> None:
    model = MixtureDecoder()
    found = plan(model, EP2, styles={"layers.1.mlp.experts": "replicate"})
    assert [each.name for each in found.experts] == ["layers.0.mlp.experts", "layers.2.mlp.experts"]
    refused(model, "found no experts to divide", styles={"mlp.experts": "replicate"})


class NormalisedExperts(StackedExperts):
    """Divides weights by their sum over the choices of a row."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        weights = top_k_weights / top_k_weights.sum(-1, keepdim=True)
        return super().forward(hidden_states, top_k_index, weights)


class MixingExperts(StackedExperts):
    """Subtracts the mean of an expert's rows."""

    def result(self, rows, expert):
        return super().result(rows - rows.mean(0), expert)


class LimitedExperts(StackedExperts):
    """Computes three rows for an expert, and leaves out others."""

    def result(self, rows, expert):
        found = super().result(rows, expert)
        return torch.cat([found[:3], torch.zeros_like(found[3:])])


class TrainedExperts(MixingExperts):
    """Mixes rows in training mode only."""

    def result(self, rows, expert):
        if self.training:
            return super().result(rows, expert)
        return StackedExperts.result(self, rows, expert)


class NumberedExperts(StackedExperts):
    """Adds the number of the expert, which another rank would not know."""

    def result(self, rows, expert):
        return super().result(rows, expert) + expert


class WeighedInputs(StackedExperts):
    """Multiplies the rows by the weights, not the results."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        ones = torch.ones_like(top_k_weights)
        return super().forward(
            hidden_states * top_k_weights.sum(1, keepdim=True), top_k_index, ones
        )


class ConstantExperts(StackedExperts):
    """Has a buffer for each expert, which is no parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scales", torch.arange(4.0))

    def result(self, rows, expert):
        return super().result(rows, expert) * self.scales[expert]


class SkippedExperts(nn.Module):
    """Has rows of which only a mask says whether they count."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, rows, mask):
        return torch.einsum("th,ehi,te->ti", rows, self.weight, mask)


class SeparateExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


@pytest.mark.parametrize(
    "kind",
    [NormalisedExperts, MixingExperts, LimitedExperts, TrainedExperts, NumberedExperts,
     WeighedInputs, ConstantExperts],
)  # fmt: skip
def test_experts_that_are_no_weighted_sum_are_refused(kind: type[nn.Module]) -> None:
    refused(Mixture(kind()), rf"experts: {kind.__name__}: its result for a row is not the sum")


def test_experts_in_other_forms_are_refused() -> None:
    refused(
        SeparateExperts(),
        "experts: ModuleList has its experts as 4 modules, not as stacked parameters;",
    )
    refused(
        SkippedExperts(),
        "the model: SkippedExperts: it is not called with the experts of each row; expected a",
    )
    refused(nn.Conv1d(4, 4, 3), r"found no experts to divide in Conv1d; expected .* ep = 1 works")
    hooked = Mixture(BiasedExperts())
    hooked.experts.norm.register_forward_hook(lambda *_: None)
    refused(hooked, "BiasedExperts has hooks inside, which would see tokens of other ranks")
    own = Mixture(StackedExperts())
    own.experts.forward = own.experts.forward
    refused(own, "StackedExperts has a forward of its own")


def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    model = Mixture(StackedExperts(6), 6)
    refused(
        model,
        "experts: ep must divide the experts: 4 does not divide 6; 2 does",
        Layout(dp=4, ep=4),
    )
    assert plan(model, Layout(dp=3, ep=3)).experts[0].experts == 6


def test_modules_that_divide_themselves_have_no_stacks() -> None:
    shape = Transformer(
        layers=1, hidden=8, heads=2, vocab=11, experts=4, top_k=2, expert_ffn=6, gated=True
    )
    assert plan(TransformerModel(shape, seed=0), EP2).experts == ()


def test_experts_in_narrow_types_are_found() -> None:
    for kind in (torch.bfloat16, torch.float16, torch.float64):
        model = Mixture(SortingExperts()).to(kind)
        assert len(plan(model, EP2).experts) == 1
        with pytest.raises(ValueError, match="is not the sum"):
            plan(Mixture(NormalisedExperts()).to(kind), EP2)


def test_experts_with_dropout_are_found() -> None:
    model = Mixture(BiasedExperts())
    model.experts.norm = nn.Sequential(nn.Dropout(0.5), model.experts.norm)
    assert len(plan(model.eval(), EP2).experts) == 1
    assert len(plan(model.train(), EP2).experts) == 1


def test_experts_on_meta_are_found() -> None:
    with torch.device("meta"):
        model = MixtureDecoder()
    assert len(plan(model, EP2).experts) == 3


def test_experts_without_random_weights_are_checked_too() -> None:
    model = Mixture(NormalisedExperts())
    for each in model.parameters():
        nn.init.zeros_(each)
    refused(model, "is not the sum")
