"""Parts of a mixture of experts, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from unisono.parallel import Layout
from unisono.parallel.layers.expert_loads import balance_loss
from unisono.parallel.layers.mixture_of_experts import MixtureOfExperts
from unisono.planner import Transformer


@pytest.mark.parametrize(
    ("layout", "near"),
    [(Layout(dp=3, ep=3), 1), (Layout(dp=6, ep=6), 2), (Layout(dp=12, dp_replicate=2, ep=3), 2)],
)
def test_a_proposed_number_of_expert_ranks_divides_experts_and_ranks(
    layout: Layout, near: int
) -> None:
    shape = Transformer(layers=1, hidden=4, heads=1, vocab=5, experts=8, top_k=2, expert_ffn=4)
    mesh = cast("Any", SimpleNamespace(layout=layout))
    expected = f"ep must divide the experts: {layout.ep} does not divide 8; {near} does$"
    with pytest.raises(ValueError, match=expected):
        MixtureOfExperts(shape).divide(mesh)


def test_a_rank_without_samples_adds_no_balance_loss() -> None:
    scores = torch.zeros(0, 4, 2, requires_grad=True)
    chosen = torch.zeros(0, 4, 1, dtype=torch.long)
    loss = balance_loss(scores, chosen, groups=(), length=4)
    loss.backward()
    assert float(loss.detach()) == 0 and scores.grad is not None
