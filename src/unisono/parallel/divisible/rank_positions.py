"""The positions of a sequence that a rank holds."""

from __future__ import annotations

import torch

from unisono.division import part_of
from unisono.parallel.context import zigzag_part
from unisono.parallel.training_mesh import TrainingMesh


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
