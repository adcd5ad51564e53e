"""ZeRO-1: each rank keeps the optimizer's states of an equal part of all parameters.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
The parts are cut from one flat array of all parameters, so they have equal sizes for any shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.data_parallelism.flat_parameters import FlatParameters
from unisono.torch_backend import all_gather_single, reduce_scatter_single


class ShardedOptimizer:
    """Sums gradients over a group, updates this rank's part, and gathers the parameters.

    A step sends (n-1)/n of the parameters' bytes twice: one reduce_scatter, one all_gather. With P
    float32 parameters and Adam, a rank holds 4 P bytes of weights, 4 P of gradients, and 8 P / n of
    states. The parameters become views of one flat array, and so do their gradients; both are
    padded to a multiple of n.

    The optimizer sees one flat parameter. So it must work element by element, as SGD and Adam do
    and LAMB and Muon do not. The gradient of a parameter without a gradient counts as zero.

        def adam(params):
            return torch.optim.AdamW(params, 1e-3)

        optimizer = ShardedOptimizer(model.parameters(), adam, group=mesh.group("dp"))
        (loss_sum / tokens_of_all_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`optimizer` makes the optimizer for a list of parameters.

        The ranks of `group` sum the gradients and divide the states; None: torch's default group.
        Its ranks must hold equal parameters. Raises `ValueError` for parameters of several types or
        devices, and if there are none.
        """
        self._group = group
        self._flat = FlatParameters(
            _distinct(parameters),
            parts=dist.get_world_size(group),
            group=group or dist.group.WORLD,
        )
        begin, end = self._flat.part(dist.get_rank(group))
        self._part = nn.Parameter(self._flat.weights[begin:end])
        self.inner = optimizer([self._part])
        """The optimizer of this rank's part, for example for a learning rate scheduler."""

    @torch.no_grad()
    def step(self) -> None:
        """Sums the gradients of all ranks, and updates the parameters on all ranks. Collective.

        Gradients are not averaged: divide the loss by the number of samples or tokens of all ranks.
        """
        self._flat.collect()
        gradient = self._part.grad = torch.empty_like(self._part)
        reduce_scatter_single(gradient, self._flat.gradient, group=self._group)
        self.inner.step()
        self._part.grad = None  # frees the sum's memory until the next step
        all_gather_single(self._flat.weights, self._part.detach(), group=self._group)

    def zero_grad(self) -> None:
        """Sets all gradients to zero, in the flat array."""
        self._flat.zero_gradients()


def _distinct(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the parameters that require a gradient, each once.

    Raises `ValueError` if there are none, or if they have several types or devices.
    """
    found = list(dict.fromkeys(each for each in parameters if each.requires_grad))
    if not found:
        raise ValueError("parameters: expected at least one that requires a gradient, got none")
    kinds = {(each.dtype, each.device) for each in found}
    if len(kinds) > 1:
        names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"parameters: expected one element type and device, got {names}")
    return found
