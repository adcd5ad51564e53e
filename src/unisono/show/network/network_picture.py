"""A network as one static SVG. Discs are ranks, squares are switches, and colours are kinds of
links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from unisono.errors import UnsupportedError
from unisono.show.network.facts import KIND_NAMES, network_facts
from unisono.show.network.node_positions import Points, node_positions
from unisono.show.palette import palette
from unisono.show.placement import number
from unisono.show.svg_elements import FAINT, INK, PAPER, SOFT, draw_document, draw_text
from unisono.show.unit_text import rate_text
from unisono.topology import LinkKind, NodeKind, Topology

MAX_NODES = 4096
"""Maximum number of nodes; larger drawings would be illegible."""
_WIDE, _HIGH, _EDGE = 1120.0, 600.0, 40.0
_NODE_LABELS = {
    NodeKind.SWITCH: "S",
    NodeKind.NVSWITCH: "NV",
    NodeKind.PCIE_SWITCH: "P",
    NodeKind.SOCKET: "CPU",
    NodeKind.NIC: "N",
}


def network_svg(topology: Topology, *, heading: bool = True) -> str:
    """Returns the picture of a network as SVG text, by default with the network's name and facts on
    top.

    Raises `UnsupportedError` for more than 4,096 nodes.

    >>> from unisono import topology
    >>> network_svg(topology.ring(8))[:4]
    '<svg'
    """
    drawing = Drawing.of(topology)
    head = 62.0 if heading else 0.0
    short = [fact for fact in network_facts(topology) if fact[0] != "other nodes"]
    facts = " · ".join(f"{name} {value}" for name, value in short)
    high = head + drawing.high + 34
    return draw_document(
        (_WIDE, high),
        topology.name,
        [
            *(_heading(topology.name, facts) if heading else ()),
            f'<g transform="translate(0 {number(head)})">',
            *drawing.marks(),
            f'</g><g transform="translate(26 {number(high - 14)})">',
            *_legend(topology),
            "</g>",
        ],
        summary=facts,
    )


def _heading(name: str, facts: str) -> Iterator[str]:
    yield draw_text(26, 34, name, size=20, weight=650)
    yield draw_text(26, 54, facts, size=12, fill=SOFT)


def colors_of(topology: Topology) -> dict[LinkKind, str]:
    """Returns the colour of each kind of link in this network. A kind has the same colour in all
    pictures."""
    colors = palette(len(LinkKind))
    return {LinkKind(kind): colors[kind] for kind in np.unique(topology.links.kind).tolist()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A network with coordinates, in units of the SVG. `points` are the centres of nodes, `radius`
    is a node's radius, and `step` is the distance between neighbours."""

    topology: Topology
    points: Points
    radius: float
    step: float
    high: float
    arcs: bool
    frames: tuple[tuple[float, float, float, float], ...]

    @classmethod
    def of(cls, topology: Topology) -> Drawing:
        """Computes the positions of a network's nodes and fits them into a page."""
        if topology.num_nodes > MAX_NODES:
            raise UnsupportedError(
                f"drawings have at most {MAX_NODES:,} nodes; {topology.name} has "
                f"{topology.num_nodes:,}"
            )
        found = node_positions(topology)
        low, top = found.points.min(axis=0), found.points.max(axis=0)
        span = np.maximum(top - low, 1e-9)
        scale = min((_WIDE - 2 * _EDGE) / span[0], (_HIGH - 2 * _EDGE) / span[1], 110.0)
        # A tree of many ranks is wide and flat, so it is stretched to the available height.
        stretch = np.array([scale, scale])
        if not found.frames and not found.arcs:
            stretch[1] = min(max(scale, 240.0 / span[1]), (_HIGH - 2 * _EDGE) / span[1])
        wide, high = span * stretch
        shift = np.array([(_WIDE - wide) / 2, _EDGE])
        frames = np.array(found.frames).reshape(-1, 4)
        placed = (frames - np.tile(low, 2)) * np.tile(stretch, 2) + np.tile(shift, 2)
        return cls(
            topology=topology,
            points=(found.points - low) * stretch + shift,
            step=float(scale),
            radius=max(1.0, min(15.0, 0.32 * scale)),
            high=float(high + 2 * _EDGE),
            arcs=found.arcs,
            frames=tuple((row[0], row[1], row[2], row[3]) for row in placed.tolist()),
        )

    def marks(self) -> Iterator[str]:
        """Yields frames, cables and nodes as SVG."""
        for left, above, right, below in self.frames:
            yield (
                f'<rect x="{number(left)}" y="{number(above)}" width="{number(right - left)}" '
                f'height="{number(below - above)}" rx="6" fill="{FAINT}" opacity="0.6"/>'
            )
        yield from self._cables()
        for node in range(self.topology.num_nodes):
            yield from self._node(node)

    def _cables(self) -> Iterator[str]:
        """Yields one line per connected pair of nodes. The line stands for both directions and for
        parallel links."""
        links, colors = self.topology.links, colors_of(self.topology)
        most = float(links.bandwidth_Bps.max(initial=1.0))
        seen: set[tuple[int, int]] = set()
        thin = 0.35 if len(links) > 1500 else 0.6 if len(links) > 300 else 1.0
        for link, (src, dst) in enumerate(zip(links.src.tolist(), links.dst.tolist(), strict=True)):
            ends = (min(src, dst), max(src, dst))
            if ends in seen:
                continue
            seen.add(ends)
            share = math.sqrt(float(links.bandwidth_Bps[link]) / most)
            kind = LinkKind(int(links.kind[link]))
            yield (
                f'<path class="cable" data-ends="{ends[0]} {ends[1]}" d="{self._path(*ends)}" '
                f'fill="none" stroke="{colors[kind]}" '
                f'stroke-width="{max(0.3, (0.8 + 1.8 * share) * thin):.2f}" '
                f'opacity="{0.85 if thin == 1.0 else 0.5}"/>'
            )

    def _path(self, one: int, other: int) -> str:
        (x1, y1), (x2, y2) = self.points[one].tolist(), self.points[other].tolist()
        start, end = f"M{number(x1)} {number(y1)}", f"{number(x2)} {number(y2)}"
        length = math.hypot(x2 - x1, y2 - y1)
        if not self.arcs or length < 1.5 * self.step:
            return f"{start}L{end}"
        bend = min(0.2, 0.6 * self.step / length)
        cx, cy = (x1 + x2) / 2 + bend * (y2 - y1), (y1 + y2) / 2 - bend * (x2 - x1)
        return f"{start}Q{number(cx)} {number(cy)} {end}"

    def _node(self, node: int) -> Iterator[str]:
        x, y = self.points[node].tolist()
        kind, r = NodeKind(int(self.topology.nodes.kind[node])), self.radius
        names = self.topology.nodes.names
        name = f"rank {node}" if kind is NodeKind.RANK else kind.name.lower().replace("_", " ")
        label = str(node) if kind is NodeKind.RANK else _NODE_LABELS[kind]
        reduces = bool(self.topology.nodes.reduces[node])
        description = (
            name + (f": {names[node]}" if names else "") + (", reduces" if reduces else "")
        )
        yield f'<g class="node" data-node="{node}"><title>{escape(description)}</title>'
        if kind is NodeKind.RANK:
            shape = f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(r)}" fill="{PAPER}"'
        else:
            fill = SOFT if not reduces else INK
            half = r if kind is NodeKind.NIC else 1.1 * r
            shape = (
                f'<rect x="{number(x - half)}" y="{number(y - half)}" width="{number(2 * half)}" '
                f'height="{number(2 * half)}" rx="{number(0.35 * r)}" fill="{fill}"'
            )
        yield f'{shape} stroke="{INK}" stroke-width="{1.3 if r > 5 else 0.5}"/>'
        if r > 5.5:
            size = min(12.0, 1.7 * r / max(len(label), 1.6))
            ink = INK if kind is NodeKind.RANK else PAPER
            yield draw_text(
                x, y + 0.36 * size, label, size=size, anchor="middle", fill=ink, weight=600
            )
        yield "</g>"


def _legend(topology: Topology) -> Iterator[str]:
    x = 0.0
    for kind, color in colors_of(topology).items():
        rates = topology.links.bandwidth_Bps[topology.links.kind == kind]
        low, high = rate_text(rates.min()), rate_text(rates.max())
        text = f"{KIND_NAMES[kind]}, {low if low == high else f'{low} to {high}'} each way"
        yield f'<path d="M{number(x)} -4h26" stroke="{color}" stroke-width="3"/>'
        yield draw_text(x + 33, 0, text, size=12)
        x += 33 + 6.6 * len(text) + 24
