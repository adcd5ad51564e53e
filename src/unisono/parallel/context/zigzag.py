"""The zigzag division of a sequence: each rank has an early and a late chunk.

With a causal mask, a late position attends to more keys than an early one. So contiguous parts of
equal length would give the last rank nearly twice the mean work. With two chunks, one from each end
of the sequence, all ranks have the same work.

Source: zhuzilin/ring-flash-attention, and W. Brandon et al., "Striped attention", 2023, for the
imbalance.
"""

from __future__ import annotations

import torch

from unisono.division import part_of
from unisono.parallel.training_mesh import TrainingMesh


def zigzag_part(length: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns the positions that a rank holds: chunks `rank` and `2 ranks - 1 - rank` of `2 ranks`.

    The result is int64, of shape (length / ranks,), in increasing order. A single rank holds all
    positions. Raises `ValueError` if `2 ranks` does not divide the length, and for a rank that does
    not exist.

    >>> [zigzag_part(8, rank, 2).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: expected 0 to {ranks - 1}, got {rank}")
    if ranks == 1:
        return torch.arange(length)
    chunks = 2 * ranks
    if length < chunks or length % chunks:
        nearest = max(1, round(length / chunks)) * chunks
        raise ValueError(
            f"length: expected a multiple of 2 x {ranks} = {chunks}, got {length}; "
            f"the nearest is {nearest}"
        )
    return torch.arange(length).reshape(chunks, -1)[[rank, -1 - rank]].flatten()


def in_natural_order(parts: torch.Tensor) -> torch.Tensor:
    """Returns the whole sequence in natural order, from the zigzag parts of all ranks.

    The argument has the shape (ranks, batch, length / ranks, ...), the result (batch, length, ...).

    >>> parts = torch.stack([zigzag_part(8, rank, 2) for rank in range(2)]).unsqueeze(1)
    >>> in_natural_order(parts).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    early, late = parts.chunk(2, dim=2)
    return torch.cat([*early.unbind(), *reversed(late.unbind())], dim=1)


def in_zigzag_parts(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns the zigzag parts of all ranks, as the inverse of `in_natural_order`.

    >>> in_zigzag_parts(torch.arange(8).unsqueeze(0), 2).tolist()
    [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    """
    chunks = whole.chunk(2 * ranks, dim=1)
    pairs = [torch.cat([chunks[rank], chunks[-1 - rank]], dim=1) for rank in range(ranks)]
    return torch.stack(pairs)


def own_positions(mesh: TrainingMesh, *, length: int, is_divided: bool = False) -> torch.Tensor:
    """Returns, in order, which of the `length` positions of a sequence this rank holds.

    The result is int64, with one dimension. The ranks of `cp` divide the sequence in zigzag parts.
    `is_divided`: True if the ranks of `tp` divide these parts, as sequence parallelism does.
    """
    layout, place = mesh.layout, mesh.coordinates
    found = zigzag_part(length, place["cp"], layout.cp)
    if not is_divided or mesh.group("tp") is None:
        return found
    first, count = part_of(len(found), place["tp"], layout.tp)
    return found[first : first + count]
