"""The positions of a sequence that a rank holds, and tensors that are divided by positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from unisono.parallel.context import zigzag_part

_ATTRIBUTE = "_unisono_placement"


@dataclass(frozen=True, slots=True)
class Placement:
    """The dimension of a tensor that is divided by positions."""

    dim: int
    outer: int = 1
    """The dimension joins `outer` x positions x `inner` elements, as after `flatten`."""
    inner: int = 1

    def at(self, dim: int) -> Placement:
        """Returns the same division of another dimension."""
        return self if dim == self.dim else Placement(dim, self.outer, self.inner)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePart:
    """The positions that a rank holds, in zigzag order, of sequences of `length` positions.

    >>> part = SequencePart(length=8, rank=0, ranks=2)
    >>> part.of(torch.arange(8), Placement(0)).tolist()
    [0, 1, 6, 7]
    """

    length: int
    rank: int
    ranks: int

    @property
    def own(self) -> int:
        """Number of positions of this rank."""
        return self.length // self.ranks

    def positions(self) -> torch.Tensor:
        """Returns the positions of this rank.

        Raises `ValueError` for a length that the ranks cannot divide.
        """
        return zigzag_part(self.length, self.rank, self.ranks)

    def size(self, placement: Placement) -> int:
        """Returns the size of a divided dimension in the whole tensor."""
        return placement.outer * self.length * placement.inner

    def own_size(self, placement: Placement) -> int:
        """Returns the size of a divided dimension on this rank."""
        return placement.outer * self.own * placement.inner

    def of(self, whole: torch.Tensor, placement: Placement) -> torch.Tensor:
        """Returns this rank's part of a whole tensor."""
        dim, half = placement.dim, self.own // 2
        is_joined = placement.outer * placement.inner > 1
        if is_joined:
            sizes = [placement.outer, self.length, placement.inner]
            whole = whole.reshape(*whole.shape[:dim], *sizes, *whole.shape[dim + 1 :])
            dim += 1
        late = self.length - (self.rank + 1) * half
        part = torch.cat(
            [whole.narrow(dim, self.rank * half, half), whole.narrow(dim, late, half)], dim
        )
        return part.flatten(dim - 1, dim + 1) if is_joined else part

    def shape(self, part: torch.Tensor, placement: Placement) -> torch.Size:
        """Returns the shape of the whole tensor."""
        sizes = list(part.shape)
        sizes[placement.dim] = self.size(placement)
        return torch.Size(sizes)


def placement_of(tensor: object) -> Placement | None:
    """Returns how a tensor is divided by positions; None for a whole tensor."""
    return getattr(tensor, _ATTRIBUTE, None)


def place(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Notes that a tensor is divided by positions; returns the tensor."""
    setattr(tensor, _ATTRIBUTE, placement)
    return tensor


def sequence_length(tensors: Iterable[torch.Tensor]) -> int | None:
    """Returns the number of positions of a batch's sequences; None for a batch without sequences.

    They are dimension 1 of integers (samples, positions), or else of vectors (samples, positions,
    ...).

    >>> sequence_length([torch.ones(2, 5, 3), torch.ones(2, 4, dtype=torch.int64)])
    4
    """
    tensors = list(tensors)
    for is_found in (_has_tokens, _has_vectors):
        for each in tensors:
            if is_found(each):
                return each.shape[1]
    return None


def _has_tokens(x: torch.Tensor) -> bool:
    return x.dim() == 2 and not x.is_floating_point()


def _has_vectors(x: torch.Tensor) -> bool:
    return x.dim() > 2
