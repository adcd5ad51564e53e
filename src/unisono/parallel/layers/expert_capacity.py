"""The capacity of experts: the largest number of tokens of a sequence that an expert takes.

Lepikhin et al., "GShard", 2020: an expert takes tokens in their order, and drops the others. The
capacity applies to one sequence. With a capacity per batch, the dropped tokens would depend on the
division into ranks and microbatches.
"""

from __future__ import annotations

from math import ceil

import torch
from torch.nn import functional

from unisono.parallel.context import in_natural_order
from unisono.parallel.divisible.exchanges import gather_copies
from unisono.parallel.divisible.rank_positions import own_positions
from unisono.parallel.training_mesh import TrainingMesh
from unisono.torch_backend import all_gather_single


def capacity_of(factor: float, *, length: int, top_k: int, experts: int) -> int:
    """Returns the capacity for one sequence: `factor` times the mean load of an expert, rounded up.

    >>> capacity_of(1.25, length=16, top_k=2, experts=8)
    5
    """
    return ceil(factor * length * top_k / experts)


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
        parts = found.new_empty(mesh.layout.cp, *found.shape)
        all_gather_single(parts.flatten(0, 1), found.contiguous(), group=group)
        found = in_natural_order(parts)
    return found.long()
