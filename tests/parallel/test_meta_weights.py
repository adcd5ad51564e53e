"""Values of models on the device meta, compared with those of the models' constructors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from unisono.parallel.checkpoint import TensorBlock  # noqa: E402
from unisono.parallel.meta_weights import InitialValues, give_memory, meta_names  # noqa: E402
from unisono.parallel.meta_weights.initializer_watch import (  # noqa: E402
    InitializerWatch,
    WatchedTensor,
)

pytestmark = pytest.mark.torch


def whole_blocks(model):
    return [
        TensorBlock(name=name, shape=tuple(x.shape), start=(0,) * x.dim(), values=x)
        for name, x in model.state_dict(keep_vars=True).items()
    ]


def filled(make, **options):
    """Returns a model that is made on meta, and gets its values."""
    with torch.device("meta"):
        model = make()
    torch.manual_seed(3)
    initial = InitialValues(model)
    give_memory([model])
    with torch.no_grad():
        initial.fill(whole_blocks(model), [model], **{"has_file": False, **options})
    return model


def require_equal(make):
    torch.manual_seed(3)
    expected = make()
    if hasattr(expected, "init_weights"):  # the values are its own, not those of the constructors
        torch.manual_seed(3)
        expected.init_weights()
    after = torch.get_rng_state()
    found = filled(make)
    assert torch.equal(torch.get_rng_state(), after)
    for name, each in [*expected.named_parameters(), *expected.named_buffers()]:
        path, _, key = name.rpartition(".")
        assert torch.equal(getattr(found.get_submodule(path), key), each), name
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)),
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=2), nn.LayerNorm(4)),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)),
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.Linear(400, 300, dtype=torch.bfloat16),  # memory of its own
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        lambda: nn.LSTM(4, 5, num_layers=2, proj_size=3),
        lambda: nn.ModuleList([nn.Bilinear(2, 3, 4), nn.PReLU(), nn.EmbeddingBag(5, 2)]),
    ],
)
def test_values_are_those_of_the_constructors(make) -> None:
    require_equal(make)


class Rotary(nn.Module):
    """Has a buffer that is not saved, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.scale = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(10.0 ** -torch.arange(4, device=self.angles.device))
        self.scale.data.normal_(mean=1.0)
        self.scale.data[0].zero_()


class Whole(nn.Module):
    """Draws everything in one method of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rotary, self.last = nn.Linear(4, 4), Rotary(), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.first.weight, std=0.02)
        nn.init.orthogonal_(self.first.weight)
        for each in (self.first, self.last):
            nn.init.constant_(each.bias, 0.5)
        self.rotary.reset_parameters()
        self.rotary.scale = nn.Parameter(torch.linspace(0, 1, 4))


def test_own_initializers() -> None:
    found = require_equal(Whole)
    assert found.first.weight is found.last.weight


def test_buffers_beside_a_file() -> None:
    """Tests that only buffers which no file has are computed, and no random number is drawn."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = filled(Rotary, has_file=True)  # from the same seed
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found.angles, Rotary().angles)


class Plain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "parameter":
            self.position = nn.Parameter(torch.zeros(1, 4))
        else:
            self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)


class Copies(nn.Module):
    """Reads a weight after those of other modules were drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))

    @torch.no_grad()
    def init_weights(self) -> None:
        self.first.reset_parameters()
        self.second.reset_parameters()
        self.third.weight.copy_(self.first.weight)


class Fails(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            raise RuntimeError("no draws\nhere")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plain("parameter"), "position: the parameter is on the device meta, and no init_"
         "weights or reset_parameters of Plain .* expected weights= with a file"),
        (lambda: nn.Sequential(nn.Linear(2, 2), Plain("buffer")), "1.mask: the buffer is on .*made "
         "on the CPU"),
        (Copies, "first.weight: copy_ needs its values again, after .* expected"),
        (lambda: Fails(2, 2), r"Fails.reset_parameters\(\) gives .* RuntimeError: no draws here; "),
    ],
)  # fmt: skip
def test_refusals(make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        filled(make)
    assert "\n" not in str(caught.value)


def test_memory_is_that_of_one_module() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(6)))
    alive: list[int] = []
    taken: list[str] = []

    def take(name: str, values: torch.Tensor) -> None:
        taken.append(name)
        alive.append(sum(each.numel() for each in watch._memory.values()))

    watched = [
        WatchedTensor(name=name, owner=name.split(".")[0], tensor=each, is_wanted=True)
        for name, each in model.named_parameters()
    ]
    watch = InitializerWatch(watched, take)
    with watch:
        for module in model:
            module.reset_parameters()
    watch.hand_over()
    assert max(alive) == 50 * 50 + 50
    assert taken == meta_names(model)
