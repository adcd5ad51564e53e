"""Gradients that torch's split backward passes leave out, or count twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from unisono.parallel.run.step.graph_checks import graph_nodes


def without_inputs(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[int]:
    """Returns the places of results that need a gradient, but depend on no leaf that needs one.

    Torch computes the gradients of inputs first. The gradients of parameters then begin where the
    paths from parameters meet the paths from inputs, so it never computes those of such results.
    """
    ends = {get_gradient_edge(each).node for each in leaves if each.requires_grad}
    return [
        place
        for place, each in enumerate(results)
        if each.requires_grad and ends.isdisjoint(graph_nodes([get_gradient_edge(each).node]))
    ]


def add_parameter_gradients(groups: list[dict[str, Any]]) -> None:
    """Adds the gradients of parameters, the second part of a backward pass, to `parameter.grad`.

    `groups` holds the parameters as torch groups them in the first part. The `intermediates` of a
    group are the nodes where the paths from its parameters meet the paths from inputs, and `grads`
    the gradients that arrived at these nodes.
    """
    groups = _without_overlap(groups)
    # The paths of a group with several intermediates can lead through nodes of other groups.
    is_kept = any(len(each["intermediates"]) > 1 for each in groups)
    for group in groups:
        _add_gradients_of_group(group, is_kept=is_kept)


def _without_overlap(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins groups that share parameters, whose gradients would be counted in each of them.

    Torch leaves such groups where a stage uses a parameter at several places.
    """
    disjoint: list[dict[str, Any]] = []
    for group in groups:
        overlapping = [each for each in disjoint if each["params"] & group["params"]]
        disjoint = [each for each in disjoint if not each["params"] & group["params"]]
        disjoint.append(_join([*overlapping, group]) if overlapping else group)
    return disjoint


def _join(groups: list[dict[str, Any]]) -> dict[str, Any]:
    gradients = {
        node: arrived
        for each in groups
        for node, arrived in zip(each["intermediates"], each["grads"], strict=True)
    }
    params = set().union(*(each["params"] for each in groups))
    return {"params": params, "intermediates": [*gradients], "grads": [*gradients.values()]}


def _add_gradients_of_group(group: dict[str, Any], *, is_kept: bool) -> None:
    nodes, gradients = group["intermediates"], group["grads"]
    arrived = [
        (GradientEdge(node, place), gradient)
        for node, each in zip(nodes, gradients, strict=True)
        for place, gradient in enumerate(each)
        if gradient is not None
    ]
    if not arrived:
        return
    handles = []
    if len(nodes) > 1:  # from one to the next, gradients must not be counted again
        for node, each in zip(nodes, gradients, strict=True):
            handles.append(node.register_prehook(lambda _, complete=each: complete))
    try:
        found = torch.autograd.grad(
            [edge for edge, _ in arrived],
            [GradientEdge(each, 0) for each in group["params"]],
            [gradient for _, gradient in arrived],
            retain_graph=is_kept,
        )
    finally:
        for handle in handles:
            handle.remove()
    for node, gradient in zip(group["params"], found, strict=True):
        parameter = _parameter_of(node)
        if parameter.grad is None:
            # parameters that are added share its memory
            parameter.grad = gradient.to(parameter.dtype, copy=True)
        else:
            parameter.grad += gradient


def _parameter_of(node: Any) -> torch.Tensor:
    """Returns the parameter of a node that torch takes for its end of the graph. A copy of the
    parameter in another type ends in the node of the conversion."""
    end = node if hasattr(node, "variable") else node.next_functions[0][0]
    found: torch.Tensor = end.variable
    return found
