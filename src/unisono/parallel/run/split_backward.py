"""Gradients that torch's split backward passes leave out, or count twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def joined(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins all groups of parameters if the stage uses a parameter at several places.

    Torch computes the gradients of parameters group by group. With such a parameter, several groups
    can contain it, and its gradient would be counted in each; or the paths of one group lead
    through nodes that another group still needs. One group has neither problem.
    """
    if all(len(each["intermediates"]) == 1 for each in groups):
        return groups
    nodes = {
        node: gradients
        for each in groups
        for node, gradients in zip(each["intermediates"], each.get("grads", ()), strict=False)
        if gradients is not None
    }
    params = set().union(*(each["params"] for each in groups))
    return [{"params": params, "intermediates": [*nodes], "grads": [*nodes.values()]}]
