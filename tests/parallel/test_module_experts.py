"""The shape of modules with experts, derived from modules that were made from known shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from parallel.test_module_shape import Decoder, Layer  # noqa: E402
from unisono.parallel import TransformerModel, model_shape  # noqa: E402
from unisono.planner import Transformer, forward_flops  # noqa: E402

pytestmark = pytest.mark.torch


class Network(nn.Module):
    """A feed-forward network with three matrices, as those of Mixtral, Qwen and DeepSeek."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class ListedExperts(nn.Module):
    """A list of equal modules beside a linear router; returns a pair, as Mixtral's block."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.num_experts, self.top_k = shape.experts, shape.top_k
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = nn.ModuleList(
            Network(shape.hidden, shape.expert_ffn) for _ in range(shape.experts)
        )

    def forward(self, x: Any) -> Any:
        rows = x.flatten(0, 1)
        scores = self.gate(rows)
        weights, chosen = scores.softmax(-1).topk(self.top_k)
        found = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            found = found.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        return found.view_as(x), scores


class Router(nn.Module):
    """A router whose matrix is a parameter, with a correction for each expert, as DeepSeek's."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.num_experts_per_tok = shape.top_k
        self.weight = nn.Parameter(torch.zeros(shape.experts, shape.hidden))
        self.correction = nn.Parameter(torch.zeros(shape.experts))


class StackedExperts(nn.Module):
    """Parameters of three dimensions, with gate and input in one, and a shared network."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.gate = Router(shape)
        self.experts = nn.Module()
        wide = (shape.experts, 2 * shape.expert_ffn, shape.hidden)
        self.experts.gate_up_proj = nn.Parameter(torch.zeros(wide))
        narrow = (shape.experts, shape.hidden, shape.expert_ffn)
        self.experts.down_proj = nn.Parameter(torch.zeros(narrow))
        if shape.shared_experts:
            ffn = shape.shared_experts * shape.expert_ffn
            self.shared_experts = Network(shape.hidden, ffn)

    def forward(self, x: Any) -> Any:
        raise AssertionError("the routing needs values")


class ExpertLayer(Layer):
    def __init__(self, shape: Transformer, block: Any) -> None:
        super().__init__(shape)
        del self.into, self.out
        self.block = block(shape)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norms[0](x))
        found = self.block(self.norms[1](x))
        return x + (found[0] if isinstance(self.block, ListedExperts) else found)


class MaybeExperts(nn.Module):
    """A layer with or without experts, so that all layers of a model have one type."""

    def __init__(self, shape: Transformer, block: Any) -> None:
        super().__init__()
        self.inner = Layer(shape) if block is None else ExpertLayer(shape, block)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def decoder(shape: Transformer, block: Any) -> Decoder:
    model = Decoder(shape)
    kinds = [None if number < shape.dense_layers else block for number in range(shape.layers)]
    model.layers = nn.ModuleList(MaybeExperts(shape, each) for each in kinds)
    return model


MIXTRAL = Transformer(
    layers=3,
    hidden=32,
    heads=4,
    kv_heads=2,
    vocab=100,
    gated=True,
    tied=False,
    experts=6,
    top_k=2,
    expert_ffn=40,
)
DEEPSEEK = replace(MIXTRAL, shared_experts=2, dense_layers=1, ffn=96, layers=4)
SHAPES = [
    (MIXTRAL, ListedExperts),
    (replace(MIXTRAL, dense_layers=1, ffn=72), ListedExperts),
    (MIXTRAL, StackedExperts),
    (DEEPSEEK, StackedExperts),
    (replace(DEEPSEEK, expert_ffn=32, experts=2, top_k=1), StackedExperts),
]


@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_the_shape_is_found_again(shape: Transformer, block: Any) -> None:
    assert model_shape(decoder(shape, block)) == shape


@pytest.mark.parametrize(
    "shape",
    [
        MIXTRAL,
        DEEPSEEK,
        replace(MIXTRAL, gated=False, kv_heads=4, tied=True, shared_experts=1),
    ],
)
def test_our_own_model(shape: Transformer) -> None:
    found = model_shape(TransformerModel(shape), seq=64)
    assert replace(found, positions=0) == shape  # the model has one unused position


def test_flops_of_the_shape_are_those_of_a_run_with_values() -> None:
    """Tests FLOPs with experts, which the run on the meta device leaves out. torch before 2.15 does
    not count the FLOPs of the fused attention on processors, and later counts unmasked scores.
    """
    for model in (TransformerModel(DEEPSEEK), decoder(MIXTRAL, ListedExperts)):
        shape = model_shape(model)
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            model(torch.arange(24).view(1, 24))
        by_operator = counted.get_flop_counts()["Global"]
        attention = sum(n for each, n in by_operator.items() if "attention" in str(each))
        weights, _, output = forward_flops(shape, seq=24, batch=1)
        assert counted.get_total_flops() - attention == weights + output


def test_the_module_still_computes_its_experts() -> None:
    model = decoder(MIXTRAL, ListedExperts)
    tokens = torch.arange(8).view(1, 8)
    before = model(tokens)["logits"]
    model_shape(model)
    assert torch.equal(model(tokens)["logits"], before)


def test_refusals() -> None:
    model = decoder(MIXTRAL, ListedExperts)
    for layer in model.layers:
        del layer.inner.block.top_k
    with pytest.raises(ValueError, match=r"no module names its experts of a token .* pass top_k="):
        model_shape(model)
    assert model_shape(model, top_k=3).top_k == 3
    model = decoder(replace(MIXTRAL, dense_layers=1), ListedExperts)
    model.layers = model.layers[::-1]
    with pytest.raises(ValueError, match=r"layers \[0, 1\] have experts; expected dense layers fi"):
        model_shape(model)
    model = decoder(DEEPSEEK, StackedExperts)
    model.layers[1].inner.block.shared_experts.more = nn.Linear(32, 5, bias=False)
    with pytest.raises(ValueError, match=r"which is no multiple of an expert's 3 x 32 x 40"):
        model_shape(model)
    model = decoder(MIXTRAL, StackedExperts)
    for layer in model.layers:
        layer.inner.block.gate.weight = nn.Parameter(torch.zeros(6, 7))
    with pytest.raises(ValueError, match="has 6 experts, but no router with a row for each"):
        model_shape(model)
    model = decoder(MIXTRAL, ListedExperts)
    model.layers[2] = MaybeExperts(replace(MIXTRAL, experts=4), ListedExperts)
    with pytest.raises(ValueError, match="the layers have experts of different sizes"):
        model_shape(model)
