"""The watch over a model's own loss: later passes are watched from the end of one module on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.run.loss import own_loss
from unisono.parallel.run.loss.own_loss import LossWatch

pytestmark = pytest.mark.torch
CLASSES = 5


class Classifier(nn.Module):
    """Computes its loss itself, on request before its head, or from two losses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.early, self.head = nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)
        self.which = "late"
        self.operations = 0

    def forward(self, inputs, targets):
        hidden = self.body(inputs)
        early = functional.cross_entropy(self.early(hidden), targets)
        late = functional.cross_entropy(self.head(hidden), targets) / 2
        return {"late": late, "early": early, "both": early + late}[self.which]


class Late(Classifier):
    def forward(self, inputs, targets):
        hidden = self.body(inputs)
        if self.which == "before":
            return functional.cross_entropy(self.early(hidden), targets)
        if self.which == "raise":
            raise KeyError("a fault of the model")
        return functional.cross_entropy(self.head(self.head(hidden)[:, :4]), targets) * 3


def weight(watch, model, valid):
    targets = torch.arange(6) % CLASSES
    targets[valid:] = -100
    with watch.passing():
        loss = model(torch.randn(6, 3), targets)
    known, found = watch.known(loss)
    return known.weight(found)


@pytest.mark.parametrize("make", [Classifier, Late])
def test_each_pass_finds_the_weight(make):
    model = make()
    watch = LossWatch([model])
    assert [weight(watch, model, valid) for valid in (6, 4, 1, 3)] == [6, 4, 1, 3]


def test_a_pass_that_fails_changes_nothing():
    model = Late()
    watch = LossWatch([model])
    for which in ("raise", "late", "raise", "late"):
        model.which = which
        if which == "raise":
            with pytest.raises(KeyError, match="a fault of the model"):
                weight(watch, model, 2)
        else:
            assert weight(watch, model, 2) == 2


def test_losses_of_other_passes_are_known_or_refused():
    model = Classifier()
    watch = LossWatch([model])
    for which in ("late", "early", "both", "early"):
        model.which = which
        if which == "both":
            with pytest.raises(ValueError, match=r"combined with others, .*weight=f"):
                weight(watch, model, 5)
        else:
            assert weight(watch, model, 5) == 5


def test_a_loss_before_the_module_of_the_first_pass_is_refused():
    model = Late()
    watch = LossWatch([model])
    assert weight(watch, model, 5) == 5
    model.which = "before"
    with pytest.raises(ValueError, match=r"came before the end of a Linear, .*weight=f"):
        weight(watch, model, 5)
    model.which = "late"
    assert weight(watch, model, 5) == 5


def test_later_passes_watch_the_functions_after_one_module(monkeypatch):
    """The whole pass would cost a tenth of a small model's time."""
    model = Late()
    watch, watched, seen = LossWatch([model]), own_loss._Calls.__torch_function__, []

    def counting(calls, func, *others):
        seen[-1].append(func.__name__)
        return watched(calls, func, *others)

    monkeypatch.setattr(own_loss._Calls, "__torch_function__", counting)
    for _ in range(3):
        seen.append([])
        weight(watch, model, 5)
    assert "tanh" in seen[0]
    assert "tanh" not in seen[1] + seen[2]
    assert "cross_entropy" in seen[1]
    assert seen[1] == seen[2]


def test_modules_keep_no_hook_after_a_pass():
    model = Late()
    watch = LossWatch([model])
    for _ in range(3):
        weight(watch, model, 5)
        assert not any(each._forward_hooks for each in model.modules())
