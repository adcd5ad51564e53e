"""The loads of experts: the loss that balances them, and the capacity that limits them.

Both are those of one sequence. A loss or a capacity for the tokens of a batch would depend on the
division into ranks and microbatches.

DeepSeek-AI, "DeepSeek-V3", 2024, equations 17 to 20 (the loss); Lepikhin et al., "GShard", 2020: an
expert takes tokens in their order, and drops the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.nn import functional

from unisono.parallel.context import all_gather, in_natural_order
from unisono.parallel.context.zigzag import own_positions
from unisono.parallel.divisible.exchanges import Group, gather_copies
from unisono.parallel.training_mesh import TrainingMesh


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


def within_capacity(
    chosen: torch.Tensor,
    *,
    experts: int,
    capacity: int,
    mesh: TrainingMesh | None = None,
    length: int = 0,
) -> torch.Tensor:
    """Returns a mask: True for each choice that the chosen expert takes.

    Collective over `tp` and `cp`.

    `chosen`: the experts of this rank's tokens, (samples, positions, k), the shape of the result.
    `length`: with a mesh, the positions that the ranks of `tp` have together.

    >>> chosen = torch.tensor([[[0], [1], [0], [0]]])
    >>> within_capacity(chosen, experts=2, capacity=2).flatten().tolist()
    [True, True, True, False]
    """
    whole = chosen if mesh is None else _whole_sequences(chosen, mesh, length)
    flat = functional.one_hot(whole.flatten(1), experts)  # (samples, choices in order, experts)
    before = (flat.cumsum(1) - flat).gather(2, whole.flatten(1).unsqueeze(-1))
    taken = (before.squeeze(-1) < capacity).view_as(whole)
    if mesh is None:
        return taken
    return taken[:, own_positions(mesh, length=whole.shape[1], is_divided=True)]


def _whole_sequences(chosen: torch.Tensor, mesh: TrainingMesh, length: int) -> torch.Tensor:
    """Returns the chosen experts of all positions, gathered from the ranks of `tp` and `cp`."""
    # Expert numbers are sent in the default float type, in which they are exact.
    numbers = chosen.to(torch.get_default_dtype())
    found = gather_copies(numbers, mesh.group("tp"), dim=1, length=length)
    group = mesh.group("cp")
    if group is not None:
        found = in_natural_order(all_gather(found, group))
    return found.long()
