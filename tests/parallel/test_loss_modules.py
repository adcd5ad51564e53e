"""The modules that a loss calls are found in functions and objects."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("torch")

from torch import nn

from unisono.parallel.run.loss.loss_state import loss_modules

pytestmark = pytest.mark.torch
MODULE = nn.MSELoss()


def of_global(x, y):
    return MODULE(x, y)


class Callable:
    def __init__(self):
        self.inner = nn.L1Loss()

    def __call__(self, x, y):
        return self.inner(x, y)


def of_variable():
    inner = nn.HuberLoss()
    return lambda x, y: inner(x, y) * 2


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (MODULE, [("", "MSELoss")]),
        (MODULE.forward, [("", "MSELoss")]),
        (of_global, [("MODULE", "MSELoss")]),
        (of_variable(), [("inner", "HuberLoss")]),
        (lambda x, y: of_global(x, y) * 2, [("of_global.MODULE", "MSELoss")]),
        (functools.partial(of_global), [("MODULE", "MSELoss")]),
        (functools.partial(lambda inner, x, y: inner(x, y), MODULE), [("argument0", "MSELoss")]),
        (Callable(), [("inner", "L1Loss")]),
        (nn.functional.mse_loss, []),
        (len, []),
    ],
)
def test_modules(loss, expected):
    assert [(name, type(each).__name__) for name, each in loss_modules(loss)] == expected
