"""Stages cut from traced graphs, compared with the whole model in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from parallel.worlds.traced_models import TracedDecoder
from unisono.parallel import Layout, Precision
from unisono.parallel.layers import LayoutDropout
from unisono.parallel.run.batch.batch_tree import BatchTree
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.pipeline.all_stages import all_stages, first_microbatch
from unisono.parallel.run.pipeline.traced_graph import TracedCall
from unisono.parallel.run.pipeline.traced_stages import traced_stages

pytestmark = pytest.mark.torch

TOKENS = torch.arange(24).reshape(2, 12) % 11


def cut(model, example, count):
    """Returns the stages of a model that is called with a tensor like `example`."""
    batch = BatchTree.of(example)
    call = TracedCall(ModelCall(model), batch, needs_loss=False)
    return traced_stages(model, call, count, Precision())


def run_stages(stages, inputs):
    """Runs stages one after another, as ranks do: each begins with leaves that are copies."""
    boundaries = []
    values = (inputs,)
    for stage in stages:
        values = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in values)
        found = stage(*values)
        found = found if isinstance(found, tuple) else (found,)
        boundaries.append((values, found))
        values = found
    return boundaries


def backward(boundaries, gradient):
    """Runs the backward passes of the stages; returns nothing, since parameters keep gradients."""
    gradients = (gradient,)
    for values, found in reversed(boundaries):
        pairs = [(y, g) for y, g in zip(found, gradients, strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        gradients = tuple(each.grad for each in values)


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_stages_compute_what_the_model_computes(count) -> None:
    model = TracedDecoder(vocab=11, positions=12).double()
    stages = cut(model, TOKENS, count)
    whole = model(TOKENS)
    boundaries = run_stages(stages, TOKENS)
    assert torch.equal(boundaries[-1][1][0], whole)
    gradient = torch.arange(whole.numel()).reshape(whole.shape).double().cos()
    whole.backward(gradient)
    expected = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    backward(boundaries, gradient)
    for name, each in model.named_parameters():
        if expected[name] is None:
            assert each.grad is None, name
        else:
            torch.testing.assert_close(each.grad, expected[name], rtol=1e-12, atol=1e-12)


def test_stages_hold_the_parameters_of_the_model_under_their_names() -> None:
    model = TracedDecoder(vocab=11, positions=12)
    stages = cut(model, TOKENS, 4)
    names = dict(model.named_parameters(remove_duplicate=False))
    held = [dict(stage.named_parameters()) for stage in stages]
    for stage in held:
        assert stage and all(each is names[name] for name, each in stage.items())
    assert {id(each) for stage in held for each in stage.values()} == set(map(id, names.values()))
    assert "unused.weight" in held[0]
    assert {"blocks.0.mix.weight", "head.weight"} <= set(held[0]) & set(held[3])


class Batches(nn.Module):
    """A model whose normalisation counts its calls, and runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = self.norm(layer(x))
        for layer in self.layers[2:]:
            x = layer(x)
        return x


def test_a_buffer_that_changes_stays_on_one_stage() -> None:
    model = Batches()
    inputs = torch.arange(12.0).reshape(3, 4).cos()
    stages = cut(model, inputs, 4)
    holders = [[name for name, _ in stage.named_buffers()] for stage in stages]
    assert list(map(len, holders)) == [0, 3, 0, 0]
    run_stages(stages, inputs)
    assert model.norm.num_batches_tracked == 2  # both calls, on the model's own buffer


class Aliases(nn.Module):
    """A model that changes a value in place through another view of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 64), nn.Linear(4, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x)
        left, middle = wide[:, :4], wide[:, 2:6]  # the fewest bytes cross a cut after this line
        y = self.second(left * 2)
        left.add_(1)
        return y.sum() + middle


def test_no_cut_separates_views_of_a_memory_that_changes() -> None:
    model, inputs = Aliases(), torch.arange(8.0).reshape(2, 4)
    stages = cut(model, inputs, 2)
    assert torch.equal(run_stages(stages, inputs)[-1][1][0], model(inputs))


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class OwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(Triple.apply(self.linear(x)))


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (Branch(), "cannot trace Branch: its forward pass branches on values of tensors"),
        (
            OwnBackward(),
            "OwnBackward, but its graph has no .* autograd function Triple; pp = 1",
        ),
        (nn.Bilinear(3, 3, 3), "torch.export cannot trace Bilinear: TypeError: "),
        (
            nn.Linear(3, 3),
            "2 stages need 1 cuts, but the values of the graph allow 0; 1 stages work",
        ),
    ],
)
def test_refused_models(model, error, capfd) -> None:
    with pytest.raises(ValueError, match=error) as caught:
        cut(model, torch.ones(2, 3), 2)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == "", "torch prints the graph so far"


def test_refused_layouts() -> None:
    def refused(layout, error, example=TOKENS, model=None) -> None:
        model = model or TracedDecoder(vocab=11, positions=12)
        with pytest.raises(ValueError, match=error) as caught:
            all_stages(
                model,
                layout,
                first_microbatch(model, layout, example, microbatches=2, is_local=False),
                call=ModelCall(model),
                needs_loss=False,
                precision=Precision(),
            )
        assert "\n" not in str(caught.value)

    refused(Layout(pp=2, dp=2), "a multiple of microbatches x dp = 2 x 2 = 4 samples, got 2")
    refused(Layout(pp=2), r"not TracedDecoder; parallelize\(..., example=inputs\)", example=None)
    dropout = nn.ModuleList([LayoutDropout(0.1, seed=0, site="x")])
    refused(Layout(pp=2), "pp traces ModuleList, but .* LayoutDropout", model=dropout)
