"""The results of a stage that torch's split backward passes leave out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import Node, get_gradient_edge


def without_inputs(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[int]:
    """Returns the places of results that need a gradient, but depend on no leaf that needs one.

    Torch computes the gradients of inputs first. The gradients of parameters then begin where the
    paths from parameters meet the paths from inputs, so it never computes those of such results.
    """
    ends = {get_gradient_edge(each).node for each in leaves if each.requires_grad}
    return [
        place
        for place, each in enumerate(results)
        if each.requires_grad and not _reaches(get_gradient_edge(each).node, ends)
    ]


def _reaches(begin: Node, ends: set[Node]) -> bool:
    """Returns True if an autograd graph leads from a node to one of the ends."""
    waiting, seen = [begin], {begin}
    while waiting:
        node = waiting.pop()
        if node in ends:
            return True
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return False
