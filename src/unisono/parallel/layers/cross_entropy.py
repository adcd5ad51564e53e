"""Cross entropy of logits, whose vocabulary may be split by tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from unisono.division import part_of
from unisono.parallel.divisible.exchanges import Group
from unisono.parallel.rank_grid import GROUPS
from unisono.parallel.training_mesh import TrainingMesh

IGNORED = -100
"""Target of positions that do not count in the loss, as in torch."""


class CrossEntropy(nn.Module):
    """The mean cross entropy over the valid targets, in nats.

    Logits have the shape (..., vocabulary), and targets (...) are class numbers; `IGNORED` targets
    do not count. After `divide`, the logits are this rank's part of the vocabulary, and no rank
    holds all logits: three all_reduces of one number per token combine the parts. If tensor
    parallelism also divides the samples, the result is the share of this rank's samples in the mean
    over all targets.

    >>> CrossEntropy()(torch.zeros(2, 4), torch.tensor([1, IGNORED]))
    tensor(1.3863)
    """

    def __init__(self, vocab: int | None = None) -> None:
        """`vocab`: number of classes, which `divide` needs."""
        super().__init__()
        self.vocab = vocab
        self._group: Group = None
        self._first = 0
        self._mesh: TrainingMesh | None = None

    def divide(self, mesh: TrainingMesh) -> None:
        """Makes later calls expect the logits of this rank's part of the vocabulary.

        Raises `ValueError` if the loss does not know the number of classes.
        """
        if mesh.group("tp") is None:
            return
        if self.vocab is None:
            raise ValueError(
                "CrossEntropy: tp needs the number of classes; use CrossEntropy(vocab)"
            )
        axis = mesh.logit_axis
        self._mesh, self._group = mesh, mesh.group(axis)
        self._first, _ = part_of(self.vocab, mesh.coordinates[axis], len(mesh.ranks(axis)))

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            flat = logits.flatten(0, -2)
            return functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED)
        return self.total(logits, targets) / (targets != IGNORED).sum()

    def total(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses of this rank's samples, which may have no valid target.

        The sum is float32 at least: logits of fewer bits are converted.
        """
        flat = logits.flatten(0, -2)
        flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
        if self._mesh is None:
            return functional.cross_entropy(
                flat, targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        wanted = _own_samples(targets, self._mesh).flatten()
        losses: torch.Tensor = _DividedCrossEntropy.apply(flat, wanted, self._first, self._group)  # type: ignore[no-untyped-call]
        return losses.where(wanted != IGNORED, 0).sum()  # a product with 0 may be NaN


def _own_samples(x: torch.Tensor, mesh: TrainingMesh) -> torch.Tensor:
    """Returns the samples whose logits this rank holds.

    Tensor parallelism in 2D, 2.5D and 3D also splits the samples.
    """
    if mesh.logit_axis == "tp":
        return x
    for axis in GROUPS["tp"]:
        if axis != mesh.logit_axis:
            begin, count = part_of(len(x), mesh.coordinates[axis], mesh.grid.sizes[axis])
            x = x[begin : begin + count]
    return x


class _DividedCrossEntropy(torch.autograd.Function):
    """The loss of each token, from logits of shape (tokens, part of the vocabulary)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        count = logits.shape[-1]
        highest = logits.amax(dim=-1) if count else logits.new_full(logits.shape[:-1], -torch.inf)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - highest.unsqueeze(-1)
        powers = shifted.exp()
        total = powers.sum(dim=-1)
        dist.all_reduce(total, group=group)
        place = (targets - first).clamp(0, max(count - 1, 0)).unsqueeze(-1)
        is_here = (targets >= first) & (targets < first + count)
        chosen = torch.zeros_like(total)
        if count:
            chosen = torch.where(is_here, shifted.gather(-1, place).squeeze(-1), chosen)
        dist.all_reduce(chosen, group=group)
        ctx.save_for_backward(powers / total.unsqueeze(-1), place, is_here)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, place, is_here = ctx.saved_tensors
        gradient = probabilities.clone()
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, place, -is_here.unsqueeze(-1).to(gradient.dtype))
        return gradient * gradients[0].unsqueeze(-1), None, None, None
