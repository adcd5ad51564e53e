"""The types of a precision: which are accepted, and what they mean."""

from __future__ import annotations

import math
import re

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from unisono.parallel import Precision  # noqa: E402
from unisono.parallel.precision import (  # noqa: E402
    ComputedWeights,
    LossScaler,
    cast_inputs,
    convert_parameters,
)

pytestmark = pytest.mark.torch
BF16 = Precision(computation=torch.bfloat16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"computation": torch.float8_e4m3fn}, "no training in float8 on the CPU; expected"),
        ({"reduction": torch.float8_e5m2}, "reduction = torch.float8_e5m2: torch has no training"),
        ({"computation": torch.int8}, "expected torch.float64, float32, .*, got torch.int8"),
        ({"output": "bf16"}, "output: expected torch.float64, .*, got 'bf16'"),
        ({"parameters": torch.float16}, "loses small updates.* computation = torch.float16"),
        ({"init_scale": 0.0}, "init_scale: expected a number above 0, got 0.0"),
        ({"init_scale": math.inf}, "init_scale: expected a number above 0, got inf"),
        ({"growth_interval": 0}, "growth_interval: expected a number of steps, 1 or more, got 0"),
    ],
)
def test_refused_precisions(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Precision(**given)
    assert "\n" not in str(caught.value)


def test_types_of_sums() -> None:
    cases = [
        (Precision(), torch.bfloat16, torch.bfloat16),
        (BF16, torch.float32, torch.float32),
        (BF16, torch.bfloat16, torch.float32),
        (BF16, torch.float64, torch.float64),
        (BF16, torch.int64, torch.int64),
        (Precision(reduction=torch.bfloat16), torch.float32, torch.bfloat16),
    ]
    assert [precision.reduced(kept) for precision, kept, _ in cases] == [c for *_, c in cases]


def test_scaler_follows_torch() -> None:
    """Tests the factor after each step against `GradScaler`, with overflows at random steps."""
    generator = torch.Generator().manual_seed(3)
    overflows = (torch.rand(60, generator=generator) < 0.25).tolist()
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    oracle = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scaler = LossScaler(Precision(computation=torch.float16, init_scale=2.0**10, growth_interval=3))
    for is_bad in overflows:
        oracle.scale(torch.zeros(1))
        parameter.grad = torch.tensor([math.inf if is_bad else 1.0])
        oracle.step(optimizer)
        oracle.update()
        assert scaler.accepts(math.nan if is_bad else 1.0) is not is_bad
        assert scaler.factor == oracle.get_scale()
    again = LossScaler(Precision(computation=torch.float16, growth_interval=3))
    again.load(scaler.state())
    assert again.state() == scaler.state() and again.skipped == sum(overflows)


def test_weights_return_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.GRU(3, 3))
    cast_inputs(model, BF16)
    before = dict(model.named_parameters())
    weights = ComputedWeights([model], BF16)
    with pytest.raises(ZeroDivisionError), weights.passing():
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
        output, _ = model(torch.ones(4, 2))
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
        raise ZeroDivisionError
    assert all(model.get_parameter(name) is each for name, each in before.items())
    assert {each.grad.dtype for each in before.values()} == {torch.float32}
    assert model(torch.ones(4, 2).to(torch.float32))  # of the caller, again in float32


def test_tied_weights_have_one_copy() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    with ComputedWeights([model], BF16).passing():
        assert model[0].weight is model[1].weight
        assert model[0].weight.dtype == torch.bfloat16


def test_labels_keep_their_type() -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x, mask=None, labels=None):
            return x, mask, labels

    model = Regression()
    cast_inputs(model, BF16)
    given = torch.tensor([1001.0])
    with ComputedWeights([model], BF16).passing():
        x, mask, labels = model(given, mask=(given, None), labels=given)
    assert (x.dtype, mask[0].dtype) == (torch.bfloat16, torch.bfloat16)
    assert labels is given


def test_norms_keep_their_epsilon() -> None:
    """Tests an RMS norm of small activations, which the epsilon of bfloat16 would change."""
    norm, exact = nn.RMSNorm(4), nn.RMSNorm(4)
    cast_inputs(norm, BF16)
    x = torch.tensor([[0.01, -0.02, 0.03, 0.01]])
    with ComputedWeights([norm], BF16).passing():
        found = norm(x)
    assert torch.allclose(found.float(), exact(x), rtol=0.01)


def test_parameters_are_converted() -> None:
    model = nn.Linear(2, 2)
    convert_parameters(model, Precision(parameters=torch.float64))
    assert model.weight.dtype == torch.float64
    with pytest.raises(ValueError, match=re.escape("weight is kept in float16, whose")):
        convert_parameters(model.half(), Precision(computation=torch.float16))


def test_changes_of_copies_are_noticed() -> None:
    table = nn.Embedding(4, 3, max_norm=0.1)
    weights = ComputedWeights([table], BF16)
    with weights.passing():
        pass
    assert not weights.are_changed
    with weights.passing():
        table(torch.tensor([1, 2]))
    assert weights.are_changed
