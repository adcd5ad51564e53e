"""The ranks that hold the same parameters, and exchange their weights and gradients."""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.inputs.divided_parameters import DeviceParameters
from unisono.planner.inputs.layout import Layout


class ParameterGroup(NamedTuple):
    """Parameters of one device, before ZeRO divides them."""

    parameters: float
    ranks: int
    """Number of ranks that hold the same parameters and see different tokens."""
    stride: int
    """Distance between neighbours of these ranks, in devices."""


def parameter_groups(
    found: DeviceParameters, layout: Layout
) -> tuple[ParameterGroup, ParameterGroup]:
    """Returns the group of the dense parameters and that of the routed experts.

    Ranks with the same experts are farther apart than ranks with the same dense parameters: the
    ranks of `ep` are between them. Without `ep`, tensor parallelism divides each expert.

    >>> dense, routed = parameter_groups(DeviceParameters(3.0, 2.0), Layout(dp=32, ep=8))
    >>> dense.ranks, routed.ranks, routed.stride
    (32, 4, 8)
    """
    replicas = layout.dp * layout.cp
    dense = ParameterGroup(found.dense, replicas, layout.tp)
    if layout.ep == 1:
        return dense, ParameterGroup(found.routed, replicas, layout.tp)
    return dense, ParameterGroup(found.routed, replicas * layout.tp // layout.ep, layout.ep)
