"""The memory that reports predict for optimizers and for parameters that cannot be divided."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from cases_in_turn import turn
from unisono.parallel import Layout, parallelize

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
ITEM_BYTES = 8


def test_report_memory(outcome):
    outcome.require_success()


class Scaled(nn.Module):
    """Has parameters of 24, 1 and 1 elements. One of the last two has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(4, 6))
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix * self.factor + self.shift


def memory(text, make_optimizer):
    """Returns the measured and predicted bytes of each rank, after a step."""
    torch.set_default_dtype(torch.float64)
    run = parallelize(
        Scaled(), Layout.parse(text), loss=nn.functional.mse_loss, optimizer=make_optimizer
    )
    run.step(torch.ones(4, 4), torch.zeros(4, 6))
    report = run.report()
    run.mesh.close()
    return report.memory, report.predicted.memory


def own_states_of_optimizers(world):
    for states, make_optimizer in (
        (0, lambda parameters: optim.SGD(parameters, 0.1)),
        (1, lambda parameters: optim.SGD(parameters, 0.1, momentum=0.9)),
        (2, optim.AdamW),
        (3, lambda parameters: optim.Adam(parameters, amsgrad=True)),
        (1, optim.RMSprop),
        (2, lambda parameters: optim.RMSprop(parameters, momentum=0.9)),
        (3, lambda parameters: optim.RMSprop(parameters, momentum=0.9, centered=True)),
        (1, optim.Adagrad),
        (2, optim.Adadelta),
        (2, optim.Adamax),
        (2, optim.NAdam),
        (2, optim.RAdam),
        (2, optim.Rprop),
        (1, optim.ASGD),
    ):
        with turn(states=states, optimizer=type(make_optimizer([nn.Parameter(torch.ones(1))]))):
            measured, predicted = memory("dp=2", make_optimizer)
            assert measured == predicted
            assert measured.get("optimizer", (0, 0)) == 2 * (states * 26 * ITEM_BYTES,)
            measured, predicted = memory("dp=2,zero=1", make_optimizer)
            assert measured == predicted
            assert measured.get("optimizer", (0, 0)) == 2 * (states * 13 * ITEM_BYTES,)


def own_parameters_of_one_element(world):
    """Tests that the parameter without dimensions counts on both ranks, and `shift` on one."""
    for text in ("dp=2,zero=2", "dp=2,zero=3"):
        measured, predicted = memory(text, optim.AdamW)
        elements = (12 + 1 + 1, 12 + 1)
        assert measured == predicted
        assert measured["weights"] == tuple(each * ITEM_BYTES for each in elements)
        assert measured["optimizer"] == tuple(2 * each * ITEM_BYTES for each in elements)


def own_groups_with_other_states(world):
    def two_groups(parameters):
        whole = [each for each in parameters if each.dim() == 2]
        few = [each for each in parameters if each.dim() == 0]
        return optim.SGD([{"params": whole, "momentum": 0.9}, {"params": few}], 0.1)

    measured, predicted = memory("dp=2", two_groups)
    assert measured == predicted
    assert measured["optimizer"] == 2 * (24 * ITEM_BYTES,)
