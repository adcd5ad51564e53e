"""Positions of nodes in a drawing, so that the kind of network is recognisable.

A ring is drawn as a circle, a torus as a grid with arcs, a tree in levels, and a dragonfly as
groups on a circle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono.topology import (
    Clos,
    Complete,
    DragonflyGroups,
    JoinedServers,
    Lattice,
    NodeKind,
    Topology,
)

Points: TypeAlias = NDArray[np.float64]
"""Coordinates as [nodes, 2], with x to the right and y down. Neighbours have a distance of about
1."""

_ROWS = {
    NodeKind.SOCKET: 0,
    NodeKind.PCIE_SWITCH: 1,
    NodeKind.NIC: 2,
    NodeKind.RANK: 2,
    NodeKind.NVSWITCH: 3,
    NodeKind.SWITCH: -1,
}
_OBLIQUE = np.array([[1.0, 0.0], [0.0, 1.0], [0.42, -0.34]])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePositions:
    """A point for each node. With `arcs`, links longer than one step are drawn as arcs around other
    nodes. `frames` are boxes (left, top, right, bottom) around the nodes of a server."""

    points: Points
    arcs: bool = False
    frames: tuple[tuple[float, float, float, float], ...] = ()


def node_positions(topology: Topology) -> NodePositions:
    """Returns the positions of a network's nodes.

    >>> from unisono import topology
    >>> node_positions(topology.torus([2, 2])).points.tolist()
    [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    """
    shape = topology.routing
    if isinstance(shape, Lattice):
        return _lattice(shape)
    if isinstance(shape, Complete):
        return NodePositions(points=_circle(topology.num_ranks))
    if isinstance(shape, Clos):
        return NodePositions(points=_tree(shape, topology))
    if isinstance(shape, DragonflyGroups):
        return NodePositions(points=_groups(shape))
    if isinstance(shape, JoinedServers):
        return _joined(shape)
    return NodePositions(points=_by_kind(topology))


def _circle(count: int, spacing: float = 1.0) -> Points:
    """Returns points about `spacing` apart, clockwise from the top."""
    if count == 1:
        return np.zeros((1, 2))
    angle = 2 * math.pi * np.arange(count) / count - math.pi / 2
    radius = max(spacing / (2 * math.sin(math.pi / count)), spacing * 0.7)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1) * radius


def _lattice(shape: Lattice) -> NodePositions:
    sizes = [size for size in shape.sizes if size > 1]
    if len(sizes) == 1 and any(shape.wraps):
        return NodePositions(points=_circle(sizes[0]))
    rank = np.arange(math.prod(sizes))
    points = np.zeros((len(rank), 2))
    stride, extent = 1, [1.0, 1.0]
    for axis, size in enumerate(sizes):
        at = rank // stride % size
        if len(sizes) <= 3:
            points += at[:, None] * _OBLIQUE[axis] * (1.0 if axis < 2 else max(1.0, 0.5 * size))
        else:
            # More than three axes become a grid of grids.
            side = axis % 2
            points[:, side] += at * extent[side] * (1.3 if axis > 1 else 1.0)
            extent[side] *= size * (1.3 if axis > 1 else 1.0)
        stride *= size
    return NodePositions(points=points, arcs=any(shape.wraps) or len(sizes) > 3)


def _tree(shape: Clos, topology: Topology) -> Points:
    leaves = shape.pods * shape.leaves
    if leaves == 1 and not shape.spines:
        return np.concatenate([_circle(shape.num_ranks), np.zeros((1, 2))])
    wide = float(shape.num_ranks - 1)
    rank = np.arange(shape.num_ranks)
    ranks = np.stack([rank.astype(float), np.zeros(len(rank))], axis=1)
    leaf = shape.leaf_of(rank)
    middle = np.bincount(leaf, rank, minlength=leaves) / shape.hosts
    if shape.rails > 1:
        middle = _spread(leaves, wide)
    high = max(1.5, 0.14 * wide)
    rows = [ranks, np.stack([middle, np.full(leaves, -high)], axis=1)]
    spines = shape.pods * shape.spines
    if shape.pods > 1:
        pod = np.arange(spines) // max(shape.spines, 1)
        size = shape.leaves * shape.hosts
        inside = (np.arange(spines) % shape.spines + 0.5) / shape.spines
        across = pod * size + inside * size - 0.5
    else:
        across = _spread(spines, wide)
    rows.append(np.stack([across, np.full(spines, -2 * high)], axis=1))
    cores = shape.spines * shape.cores
    rows.append(np.stack([_spread(cores, wide), np.full(cores, -3 * high)], axis=1))
    return np.concatenate(rows)


def _spread(count: int, wide: float) -> NDArray[np.float64]:
    """Returns evenly spaced positions over a width."""
    return (np.arange(count) + 0.5) / max(count, 1) * (wide + 1) - 0.5


def _groups(shape: DragonflyGroups) -> Points:
    """Places groups on a circle, the switches of each group on a small circle, and ranks outside
    their switches."""
    reach = max(1.0, 0.36 * shape.switches) * (1.6 if shape.plus else 1.0)
    rim = reach + 1.6
    centres = _circle(shape.groups, 2.35 * rim) if shape.groups > 1 else np.zeros((1, 2))
    outward = np.arctan2(centres[:, 1], centres[:, 0])
    if shape.plus:
        arc = np.zeros(shape.switches)
        along = (np.arange(shape.switches) - (shape.switches - 1) / 2) * 1.5
    else:
        arc = 2 * math.pi * np.arange(shape.switches) / shape.switches
        along = np.zeros(shape.switches)
    ranks, switches, spines = [], [], []
    fan = np.linspace(-0.5, 0.5, shape.hosts) if shape.hosts > 1 else np.zeros(1)
    for centre, direction in zip(centres, outward, strict=True):
        out = np.array([math.cos(direction), math.sin(direction)])
        side = np.array([-out[1], out[0]])
        for angle, shift in zip(arc, along, strict=True):
            towards = np.array([math.cos(direction + angle), math.sin(direction + angle)])
            switch = centre + (out * 0.3 + side * shift if shape.plus else towards * reach)
            switches.append(switch)
            if shape.plus:
                spines.append(centre - out * 1.1 + side * shift)
            for share in fan:
                bend = (
                    direction + angle + share * (1.1 if shape.plus else 2.2 / shape.switches + 0.5)
                )
                ranks.append(switch + 1.1 * np.array([math.cos(bend), math.sin(bend)]))
    return np.array(ranks + switches + spines)


def _by_kind(topology: Topology) -> Points:
    """Places sockets, PCIe switches, devices and NVSwitches in one row each. In a network without
    sockets, PCIe switches and NVSwitches, places ranks on a circle and switches inside."""
    kinds = topology.nodes.kind
    if not np.isin(kinds, (NodeKind.SOCKET, NodeKind.PCIE_SWITCH, NodeKind.NVSWITCH)).any():
        rest = topology.num_nodes - topology.num_ranks
        inner = _circle(rest, 0.8) * 0.7 if rest else np.zeros((0, 2))
        return np.concatenate(
            [_circle(max(topology.num_ranks, 3 * rest))[: topology.num_ranks], inner]
        )
    rows = np.array([_ROWS[NodeKind(kind)] for kind in kinds])
    order = _order_by_bridge(topology)
    points = np.zeros((topology.num_nodes, 2))
    wide = max(int((rows == row).sum()) for row in set(rows.tolist())) - 1
    for level, row in enumerate(sorted(set(rows.tolist()))):
        nodes = np.flatnonzero(rows == row)
        nodes = nodes[np.argsort(order[nodes], kind="stable")]
        points[nodes, 0] = _spread(len(nodes), float(wide))
        points[nodes, 1] = level * 1.8
    return points


def _order_by_bridge(topology: Topology) -> NDArray[np.float64]:
    """Returns sort keys that place nodes of the same socket or PCIe switch side by side."""
    links, kinds = topology.links, topology.nodes.kind
    order = np.arange(topology.num_nodes, dtype=np.float64)
    upper = np.isin(kinds, (NodeKind.SOCKET, NodeKind.PCIE_SWITCH))
    for _ in range(3):
        for node in range(topology.num_nodes):
            above = links.dst[(links.src == node) & upper[links.dst]]
            if len(above) and kinds[node] != NodeKind.SOCKET:
                order[node] = order[above].min() + 1e-4 * (node + 1)
    return order


def _joined(shape: JoinedServers) -> NodePositions:
    """Places the fabric (the network between servers). The nodes of each server are at the position
    of the server's endpoints in the fabric."""
    outer = node_positions(shape.fabric).points
    inner = node_positions(shape.server).points
    inner = inner - inner.min(axis=0)
    size = inner.max(axis=0) + 1.6
    cards, count = len(shape.ports), shape.fabric.num_ranks
    ends = outer[:count].reshape(shape.hosts, cards, 2).mean(axis=1)
    flat = isinstance(shape.fabric.routing, Clos) and float(np.ptp(ends[:, 1])) == 0.0
    gap = _nearest(ends)
    scale = (size[0] if flat else float(size.max())) / gap if shape.hosts > 1 else 1.0
    corners = ends * scale - (size - 1.6) / 2
    above = outer[count:] * scale
    if flat:
        corners[:, 1] = 0.0
        levels = np.unique(outer[count:, 1])[::-1]
        step = max(2.5, 0.12 * shape.hosts * size[0])
        above[:, 1] = -step * (1 + np.searchsorted(-levels, -outer[count:, 1]))
    g = shape.server.num_ranks
    hosts = corners[:, None, :] + inner[None, :, :]
    frames = tuple(
        (float(x) - 0.6, float(y) - 0.6, float(x + size[0]) - 1.0, float(y + size[1]) - 1.0)
        for x, y in corners
    )
    points = [hosts[:, :g].reshape(-1, 2), hosts[:, g:].reshape(-1, 2), above]
    return NodePositions(points=np.concatenate(points), frames=frames)


def _nearest(points: Points) -> float:
    """Returns the smallest distance between two different points."""
    if len(points) < 2:
        return 1.0
    apart = np.hypot(*(points[:, None, :] - points[None, :, :]).transpose(2, 0, 1))
    return float(apart[apart > 1e-9].min(initial=np.inf))
