"""The loss that balances the load of experts, equal in every layout.

DeepSeek-AI, "DeepSeek-V3", 2024, equations 17 to 20: a loss for each sequence. A loss over the
tokens of a batch would depend on the division into ranks and microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from unisono.parallel.divisible.exchanges import Group


def balance_loss(
    scores: torch.Tensor, chosen: torch.Tensor, *, groups: Sequence[Group], length: int
) -> torch.Tensor:
    """Returns this rank's share of the loss, summed over the sequences. Collective.

    `scores`: (batch, positions, experts), softmax of the router. `chosen`: (batch, positions, k).
    `groups`: the groups of ranks that hold other positions of the same sequences. `length`: number
    of positions of a whole sequence. The sum over the ranks is the whole loss, which is 1 for each
    balanced sequence.

    >>> scores = torch.full((1, 4, 2), 0.5)
    >>> float(balance_loss(scores, torch.tensor([[[0], [1], [0], [1]]]), groups=(), length=4))
    1.0
    """
    batch, _, experts = scores.shape
    flat = chosen.flatten(1)  # `reshape(batch, -1)` fails for a rank without samples
    loads = scores.new_zeros(batch, experts).scatter_add(
        1, flat, torch.ones_like(flat, dtype=scores.dtype)
    )
    for group in groups:
        if group is not None:
            dist.all_reduce(loads, group=group)
    shares = loads * (experts / (chosen.shape[2] * length))
    return (shares * scores.sum(1) / length).sum()


def add_gradient(y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Returns y, whose backward pass also computes the gradients of `loss`.

    So a layer does not need to pass its loss to the end of the model, which another rank may hold.
    """
    found: torch.Tensor = _AddGradient.apply(y, loss)  # type: ignore[no-untyped-call]
    return found


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)
