"""Which modules may be where the ranks divide activations; all others are refused in one line."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.utils import parametrizations

from unisono.parallel import TransformerModel
from unisono.parallel.layers import (
    FeatureNorm,
    FeedForward,
    LayoutDropout,
    MixtureOfExperts,
    SelfAttention,
    is_per_position,
)
from unisono.parallel.run.activation_checks import check_activations, last_head
from unisono.planner import Layout, Transformer

pytestmark = pytest.mark.torch
WIDTH = 8
SHAPE = Transformer(layers=2, hidden=WIDTH, heads=2, vocab=11, positions=12, tied=False)
EXPERTS = Transformer(
    layers=2, hidden=WIDTH, heads=2, vocab=11, experts=4, top_k=2, expert_ffn=5, tied=False
)
CP, SEQUENCE, GRID = "cp=2", "tp=2,sequence_parallel=1", "tp=4,tensor=2d"
CURES = {
    CP: "cp = 2 divides positions .*; dp = 2 without cp works",
    SEQUENCE: "sequence_parallel divides positions .*; sequence_parallel = 0 works",
    GRID: "tensor = 2d divides samples and features .*; tensor = 1d works",
}


class Residual(nn.Module):
    """Adds its input to the result of a module. Nothing says that it treats positions alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Declared(Residual):
    is_per_position = True

    def forward(self, x):
        return super().forward(x)


class Mixing(Declared):
    """Replaces the forward that its base class has described."""

    def forward(self, x):
        return x.cumsum(1)


class Sorted(nn.Identity):
    def forward(self, x):
        return x.sort(1).values


class Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x.flip(1))


class Renamed(nn.Linear):
    """A linear layer whose class only has another name."""


class Doubled(FeedForward):
    """Replaces the forward of a module that can be divided."""

    def forward(self, x):
        return super().forward(x).cumsum(1)


class Own(nn.Module):
    """Can be divided, so everything in it is its own affair."""

    serves = ("cp", "sequence_parallel", "tensor")

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH)

    def divide(self, mesh):
        pass

    def forward(self, x):
        return x


class Unstated(Own):
    """Can be divided, but states nothing about divided activations."""

    serves = ()


class Replaced(Own):
    """Replaces the forward that its base class has stated to be right."""

    def forward(self, x):
        return x.cumsum(1)


def patched() -> nn.Module:
    made = nn.Linear(WIDTH, WIDTH)
    made.forward = lambda x: x.flip(1)  # type: ignore[method-assign]
    return made


def hooked() -> nn.Module:
    made = nn.Linear(WIDTH, WIDTH)
    made.register_forward_hook(lambda _, arguments, result: result.cumsum(1))
    return made


def with_other_norm() -> nn.Module:
    """Returns a layer of ours with a module of torch in it that mixes positions."""
    layer = TransformerModel(SHAPE)[1]
    layer.attention_norm = nn.LayerNorm((12, WIDTH))
    return layer


def decoder(*inner: nn.Module) -> nn.Sequential:
    parts = list(TransformerModel(SHAPE))
    return nn.Sequential(*parts[:2], nn.Sequential(*inner), *parts[2:])


def check(model: nn.Module, text: str) -> None:
    check_activations(model, Layout.parse(text))


PER_POSITION = (
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: Renamed(WIDTH, WIDTH),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.RMSNorm(WIDTH),
    nn.PReLU,
    lambda: nn.Softmax(-1),
    lambda: nn.Dropout(0.1),
    lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: Declared(nn.Linear(WIDTH, WIDTH)),
    lambda: Declared(nn.Sequential(nn.Linear(WIDTH, WIDTH), SelfAttention(SHAPE))),
)
KNOWN = (
    nn.ReLU,
    nn.Identity,
    nn.Softplus,
    lambda: nn.Sequential(nn.Sequential(nn.Tanh())),
    lambda: FeedForward(SHAPE),
    lambda: SelfAttention(SHAPE),
    lambda: FeatureNorm(WIDTH, is_centred=True),
    lambda: LayoutDropout(0.1, seed=0, site="x", width=WIDTH),
    lambda: TransformerModel(SHAPE)[1],
    Own,
)
MIXING = (
    lambda: nn.Conv1d(WIDTH, WIDTH, 1),
    lambda: nn.GRU(WIDTH, WIDTH),
    lambda: nn.MultiheadAttention(WIDTH, 2),
    lambda: nn.TransformerEncoderLayer(WIDTH, 2),
    lambda: nn.GroupNorm(1, WIDTH),
    lambda: nn.InstanceNorm1d(WIDTH),
    lambda: nn.BatchNorm1d(WIDTH).eval(),
    lambda: nn.AvgPool1d(2),
    lambda: nn.LayerNorm((12, WIDTH)),
    lambda: nn.RMSNorm((12, WIDTH)),
    lambda: nn.Softmax(1),
    lambda: nn.PReLU(12),
    lambda: nn.GLU(1),
    lambda: nn.Flatten(1),
    lambda: nn.Dropout1d(0.1),
    lambda: Residual(nn.Identity()),
    lambda: Declared(nn.Conv1d(WIDTH, WIDTH, 1)),
    lambda: Declared(nn.ModuleList([nn.GRU(WIDTH, WIDTH)])),
    lambda: Mixing(nn.Identity()),
    Sorted,
    lambda: Called(WIDTH, WIDTH),
    lambda: Doubled(SHAPE),
    Unstated,
    Replaced,
    patched,
    hooked,
    with_other_norm,
)


@pytest.mark.parametrize("text", [CP, SEQUENCE])
@pytest.mark.parametrize("make", [*PER_POSITION, *KNOWN])
def test_modules_of_single_positions(make, text):
    check(decoder(make()), text)


@pytest.mark.parametrize("make", KNOWN)
def test_elementwise_modules_between_divided_features(make):
    check(decoder(make()), GRID)


def require_refused(model: nn.Module, text: str, match: str = "") -> None:
    with pytest.raises(ValueError, match=f"{match}.*{CURES[text]}") as caught:
        check(model, text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", CURES)
@pytest.mark.parametrize("make", MIXING)
def test_modules_that_may_need_whole_activations(make, text):
    require_refused(decoder(make()), text, r"^\d+")


@pytest.mark.parametrize("make", PER_POSITION)
def test_modules_of_features_between_divided_features(make):
    require_refused(decoder(make()), GRID, "^2.0")


@pytest.mark.parametrize("text", CURES)
def test_model_with_a_forward_of_its_own(text):
    class Scaled(TransformerModel):
        def forward(self, tokens):
            return super().forward(tokens).flip(1)

    require_refused(Scaled(SHAPE), text)
    check(TransformerModel(SHAPE), text)


@pytest.mark.parametrize("text", CURES)
def test_hook_of_a_sequence(text):
    model = TransformerModel(SHAPE)
    model.register_forward_pre_hook(lambda _, arguments: None)
    require_refused(model, text, "the model: has a hook")


def test_hooks_inside_of_experts():
    experts = MixtureOfExperts(EXPERTS)
    experts.router.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"^0\.router: has a hook.* tp = 1 works"):
        check(nn.Sequential(experts), "tp=2")
    check(nn.Sequential(experts), "dp=2")


@pytest.mark.parametrize(
    "make",
    [
        lambda parts: nn.Sequential(*parts[:-1]),
        lambda parts: nn.Sequential(*parts[1:]),
        lambda parts: nn.Sequential(*parts[::-1]),
        lambda parts: nn.Sequential(Declared(parts[0]), *parts[1:]),
        lambda parts: nn.Sequential(parts[0], *parts),
        lambda parts: nn.Sequential(SelfAttention(SHAPE)),
        lambda parts: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)),
    ],
)
@pytest.mark.parametrize("text", [SEQUENCE, GRID])
def test_division_between_layers_needs_an_embedding_and_a_head(make, text):
    require_refused(make(list(TransformerModel(SHAPE))), text)


@pytest.mark.parametrize("text", [SEQUENCE, GRID])
def test_modules_outside_of_embedding_and_head(text):
    parts = list(TransformerModel(SHAPE))
    check(nn.Sequential(nn.Identity(), *parts, nn.Tanh()), text)
    for made in ([nn.LayerNorm(11), *parts], [*parts, nn.Linear(11, 11)]):
        require_refused(nn.Sequential(*made), text)


def test_layouts_that_divide_no_activations_refuse_nothing():
    for text in ("dp=2", "tp=2", "pp=2", "dp=2,zero=3"):
        for make in MIXING:
            check(decoder(make()), text)


def test_head_whose_logits_are_the_result():
    parts = list(TransformerModel(SHAPE))
    head = parts[-1]
    assert last_head(nn.Sequential(*parts)) is head
    assert last_head(nn.Sequential(nn.Sequential(*parts, nn.Identity()))) is head
    assert last_head(nn.Sequential(*parts, nn.LogSoftmax(-1))) is None
    assert last_head(Residual(nn.Sequential(*parts))) is None
    watched = nn.Sequential(*parts)
    watched.register_forward_hook(lambda _, arguments, result: result.softmax(-1))
    assert last_head(watched) is None


def test_shapes_of_declared_modules_of_torch():
    """Compares the modules that are known with their results on each position alone."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, WIDTH)
    for make in PER_POSITION[:6]:
        module = make()
        assert is_per_position(module)
        alone = torch.cat([module(x[:, place : place + 1]) for place in range(4)], dim=1)
        torch.testing.assert_close(module(x), alone)
