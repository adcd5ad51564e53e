"""Stages cut between a model's repeated blocks, compared with the whole model in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.run.pipeline.block_stages import RepeatedBlocks, block_stages, check_stages

pytestmark = pytest.mark.torch
TOKENS = torch.arange(24).reshape(2, 12) % 11
LAYERS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, scale):
        return (x + torch.tanh(self.inner(x)) * scale, x.mean())


class Decoder(nn.Module):
    """A model in the manner of transformers: blocks inside a part of the model, which return
    tuples, and get more than the hidden state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Module()
        self.body.embedding = nn.Embedding(11, 8)
        self.body.start = nn.Parameter(torch.rand(8))
        self.body.register_buffer("steps", torch.arange(12.0)[:, None] / 12)
        self.body.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)
        self.spare = nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.body.embedding(tokens) + self.body.start
        return {"logits": self.head(self.norm(self.through(x, tokens)))}

    def through(self, x, tokens):
        for layer in self.body.layers:
            x = layer(x, self.body.steps[: tokens.shape[1]])[0]
        return x


def of(model, tokens=TOKENS):
    with torch.no_grad():
        return RepeatedBlocks.of(model, lambda module: module(tokens))


def run_stages(stages, tokens):
    """Runs stages one after another, as ranks do; returns the output, and what crosses."""
    arrived, crossing = None, []
    for stage in stages:
        with stage.resuming(arrived):
            found = stage(tokens)
        if stage is stages[-1]:
            return found, crossing
        arrived = tuple(each.detach().requires_grad_(each.requires_grad) for each in found)
        crossing.append((found, arrived))
    raise AssertionError


@pytest.mark.parametrize("count", [1, 2, 3, LAYERS])
def test_stages_compute_what_the_model_computes(count):
    model, alone = Decoder(), Decoder()
    stages = block_stages(model, of(model), count)
    for tokens in (TOKENS, TOKENS[:1, :5]):  # also of another shape than the example
        model.zero_grad(), alone.zero_grad()
        output, crossing = run_stages(stages, tokens)
        expected = alone(tokens)
        assert torch.equal(output["logits"], expected["logits"])
        for loss in (output["logits"].sum(), expected["logits"].sum()):
            loss.backward()
        for sent, arrived in reversed(crossing):
            pairs = [(x, y.grad) for x, y in zip(sent, arrived, strict=True) if y.grad is not None]
            torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert name.startswith("spare") or torch.equal(ours.grad, theirs.grad), name


def test_each_parameter_and_buffer_is_in_one_stage_under_its_name():
    model = Decoder()
    stages = block_stages(model, of(model), 2)
    for found in (nn.Module.named_parameters, nn.Module.named_buffers):
        names = [name for stage in stages for name, _ in found(stage)]
        assert sorted(names) == sorted(name for name, _ in found(model))
    state = {name: each for stage in stages for name, each in stage.state_dict().items()}
    assert state.keys() == model.state_dict().keys()
    assert all(state[name] is not None for name in state)
    first = {name.split(".")[0] for name, _ in stages[0].named_parameters()}
    assert first == {"body", "spare"}, "modules that nobody calls belong to the first stage"
    assert "body.layers.1.inner.weight" in dict(stages[0].named_parameters())
    assert {name for name, _ in stages[1].named_parameters()} >= {"norm.weight", "head.bias"}


def test_the_mode_of_a_stage_is_that_of_its_model():
    class Dropped(Decoder):
        def through(self, x, tokens):
            return functional.dropout(super().through(x, tokens), 0.5, self.training)

    model = Dropped()
    stages = block_stages(model, of(model.eval()), 2)
    for stage in stages:
        stage.eval()
    alone = model(TOKENS)["logits"]
    assert torch.equal(run_stages(stages, TOKENS)[0]["logits"], alone)
    for stage in stages:
        stage.train()
    assert not torch.equal(run_stages(stages, TOKENS)[0]["logits"], alone)


def test_hooks_of_blocks_run_once():
    model, seen = Decoder(), []
    model.body.layers[1].register_forward_hook(lambda *found: seen.append(found[0]))
    stages = block_stages(model, of(model), LAYERS)
    seen.clear()
    run_stages(stages, TOKENS)
    assert seen == [model.body.layers[1]]


def test_hooks_of_one_stage_are_not_those_of_another():
    model = Decoder()
    stages = block_stages(model, of(model), 2)
    stages[0].body.register_forward_hook(lambda *_: None)
    assert not stages[1].body._forward_hooks
    assert not model.body._forward_hooks


class Shortcut(Decoder):
    """Reads the embeddings after the blocks, with a weight that is 0 at first."""

    def forward(self, tokens):
        first = self.body.embedding(tokens)
        return self.head(self.through(first, tokens) + 0 * first)


class Tied(Decoder):
    """Reads the embedding's weight without a call of the embedding."""

    def forward(self, tokens):
        x = self.through(self.body.embedding(tokens), tokens)
        return functional.linear(x, self.body.embedding.weight)


class Branching(Decoder):
    """Asks for values of the hidden state."""

    def through(self, x, tokens):
        assert not x.isnan().any(), "expected numbers"
        return super().through(x, tokens)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Shortcut, "uses more in its blocks"),
        (Tied, "uses more in its blocks"),
        (Branching, "fails as stages of blocks: expected numbers"),
    ],
)
def test_models_that_need_more_than_the_block_before_are_refused(kind, text):
    model = kind().eval()
    found = of(model)
    with torch.no_grad(), pytest.raises(ValueError, match=text):
        check_stages(model(TOKENS), block_stages(model, found, 2), lambda module: module(TOKENS))


def test_a_module_that_runs_at_both_ends_belongs_to_both_stages():
    class Shared(Decoder):
        def forward(self, tokens):
            return self.norm(self.through(self.norm(self.body.embedding(tokens)), tokens))

    model = Shared().eval()
    stages = block_stages(model, of(model), 2)
    with torch.no_grad():
        check_stages(model(TOKENS), stages, lambda module: module(TOKENS))
    assert all("norm.weight" in dict(stage.named_parameters()) for stage in stages)


class Twice(Decoder):
    def through(self, x, tokens):
        return super().through(super().through(x, tokens), tokens)


class Reversed(Decoder):
    def through(self, x, tokens):
        for layer in reversed(self.body.layers):
            x = layer(x, 1)[0]
        return x


class Between(Decoder):
    def through(self, x, tokens):
        for layer in self.body.layers:
            x = self.spare(layer(x, 1)[0])
        return x


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Twice, "calls the blocks of body.layers in another order than theirs, or several times"),
        (Reversed, "calls the blocks of body.layers in another order than theirs"),
        (Between, "calls spare between blocks of body.layers"),
    ],
)
def test_other_orders_of_calls_are_refused(kind, text):
    with pytest.raises(ValueError, match=text):
        of(kind())


def test_models_without_blocks_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"no nn\.ModuleList of blocks"):
        of(model, torch.ones(2, 4))
    decoder = Decoder()
    decoder.head.forward = decoder.head.forward
    with pytest.raises(ValueError, match="has a forward of the instance head"):
        of(decoder)
