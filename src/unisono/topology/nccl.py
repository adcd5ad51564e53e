"""NCCL's topology files: `<system><cpu><pci><gpu><nvlink/>...`, as NCCL_TOPO_DUMP_FILE writes them.

Rates are those of NCCL's own model, which are lower than in data sheets. Source: NCCL 2.28,
`src/graph/topo.h` and `topo.cc` (rates), `xml.cc` (names of attributes).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree as Xml

import numpy as np

from unisono.topology.graph import LinkKind, Links, NodeKind, Nodes, Topology
from unisono.topology.ragged_lists import ints
from unisono.topology.routing import Shortest

NVSWITCH_CLASS = "0x068000"
_LANE = {"2.5": 15, "5": 30, "5.0": 30, "8": 60, "8.0": 60, "16": 120, "16.0": 120}
_LANE |= {"32": 240, "32.0": 240, "64": 480, "64.0": 480}
"""Rate of a PCIe lane in units of 100 Mbit/s, by GT/s. The product with the number of lanes,
divided by 80, is in GB/s.
"""
_SPEEDS = ("2.5", "5.0", "8.0", "16.0", "32.0", "64.0")
_NVLINK_GBPS = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (70, 20.0), (60, 18.0))
_LATENCY_S = {LinkKind.NVLINK: 200e-9, LinkKind.PCIE: 150e-9, LinkKind.INTER_SOCKET: 100e-9}


@dataclass(slots=True)
class _Node:
    kind: NodeKind
    name: str
    order: tuple[int, int] = (0, 0)
    """Sort key of a rank: the number of the rank or device, and the position in the file."""


@dataclass(slots=True)
class _Found:
    nodes: list[_Node] = field(default_factory=list)
    links: dict[tuple[int, int, LinkKind], float] = field(default_factory=dict)
    gpus: dict[str, int] = field(default_factory=dict)

    def add(self, kind: NodeKind, name: str, order: tuple[int, int] = (0, 0)) -> int:
        self.nodes.append(_Node(kind, name, order))
        return len(self.nodes) - 1

    def join(self, one: int, other: int, kind: LinkKind, rate: float) -> None:
        self.links[one, other, kind] = self.links[other, one, kind] = rate


def from_nccl_xml(text: str, *, name: str = "nccl") -> Topology:
    """Reads a server's topology from the text of NCCL's file. GPUs are ranks, ordered by `rank` or
    `dev`.

    Network cards are nodes of kind NIC. A node's name has the card's name and rate. Raises
    `ValueError` for an invalid file.

    >>> gpu = '<gpu dev="0" sm="80"/>'
    >>> pci = f'<pci busid="0000:01:00.0" link_speed="16.0 GT/s PCIe" link_width="16">{gpu}</pci>'
    >>> node = from_nccl_xml(f'<system version="1"><cpu numaid="0">{pci}</cpu></system>')
    >>> float(node.links.bandwidth_Bps[0]) / 1e9
    24.0
    """
    try:
        root = Xml.fromstring(text)
    except Xml.ParseError as error:
        raise ValueError(f"not XML: {error}") from error
    if root.tag != "system":
        raise ValueError(f"expected <system> as the root element, got <{root.tag}>")
    found = _Found()
    sockets: list[int] = []
    for cpu in root.iter("cpu"):
        socket = found.add(NodeKind.SOCKET, f"cpu{cpu.get('numaid', len(sockets))}")
        for other in sockets:
            found.join(socket, other, LinkKind.INTER_SOCKET, _between(cpu) * 1e9)
        sockets.append(socket)
        _read_below(found, cpu, socket)
    if not found.gpus:
        raise ValueError("expected at least one <gpu> as a rank, found none")
    _read_nvlinks(found, root)
    return _topology(found, name)


def _read_below(found: _Found, element: Xml.Element, above: int) -> None:
    for child in element:
        if child.tag == "nic":
            for net in child.iter("net"):
                title = f"{net.get('name', 'net')} {net.get('speed', '10000')} Mbit/s"
                card = found.add(NodeKind.NIC, title)
                found.join(
                    card, above, LinkKind.PCIE, _pcie(element) if element.tag == "pci" else 12e9
                )
        if child.tag != "pci":
            continue
        gpus = child.findall("gpu")
        for gpu in gpus:
            place = int(gpu.get("rank", gpu.get("dev", "0")))
            bus = child.get("busid", "")
            rank = found.add(NodeKind.RANK, bus, (place, len(found.nodes)))
            found.gpus[bus.lower()] = rank
            found.join(rank, above, LinkKind.PCIE, _pcie(child))
        if gpus:
            continue
        if child.find("pci") is None:
            _read_below(found, child, above)
            continue
        bridge = found.add(NodeKind.PCIE_SWITCH, child.get("busid", ""))
        found.join(bridge, above, LinkKind.PCIE, _pcie(child))
        _read_below(found, child, bridge)


def _read_nvlinks(found: _Found, root: Xml.Element) -> None:
    nvswitch_node = -1
    for pci in root.iter("pci"):
        gpu = pci.find("gpu")
        if gpu is None:
            continue
        rank = found.gpus[pci.get("busid", "").lower()]
        for link in gpu.iter("nvlink"):
            rate = int(link.get("count", "1")) * _nvlink(int(gpu.get("sm", "80"))) * 1e9
            peer = found.gpus.get(link.get("target", "").lower())
            if peer is None:
                nvswitch_node = (
                    found.add(NodeKind.NVSWITCH, "nvswitch") if nvswitch_node < 0 else nvswitch_node
                )
                # All NVSwitches become one node, to which a GPU has the sum of its NVLinks.
                rate += found.links.get((rank, nvswitch_node, LinkKind.NVLINK), 0.0)
                found.join(rank, nvswitch_node, LinkKind.NVLINK, rate)
            else:
                found.join(rank, peer, LinkKind.NVLINK, rate)


def _pcie(pci: Xml.Element) -> float:
    """Returns the bytes per second of a device's PCIe link. If the file does not have the speed or
    the width, generation 3 or 16 lanes are assumed.
    """
    speed = pci.get("link_speed", "").split(" ")[0]
    width = int(pci.get("link_width") or 0) or 16
    return width * _LANE.get(speed, 60) / 80 * 1e9


def _nvlink(capability: int) -> float:
    return next((rate for first, rate in _NVLINK_GBPS if capability >= first), 20.0)


def _between(cpu: Xml.Element) -> float:
    """Returns the GB/s between sockets, which depends on the processor."""
    arch, vendor = cpu.get("arch", ""), cpu.get("vendor", "")
    family, model = int(cpu.get("familyid") or 0), int(cpu.get("modelid") or 0)
    if arch == "ppc64":
        return 32.0
    if arch == "x86_64" and vendor == "GenuineIntel":
        return next(
            g for m, g in ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0), (0, 6.0)) if model >= m
        )
    if arch == "x86_64" and vendor == "AuthenticAMD":
        return next(g for f, g in ((0xBF, 32.0), (0xAF, 24.0), (0, 16.0)) if family >= f)
    return 6.0


def _topology(found: _Found, name: str) -> Topology:
    ranks = sorted(found.gpus.values(), key=lambda node: found.nodes[node].order)
    order = ranks + [i for i, node in enumerate(found.nodes) if node.kind != NodeKind.RANK]
    number = {node: i for i, node in enumerate(order)}
    nodes = [found.nodes[node] for node in order]
    kinds = [kind for _, _, kind in found.links]
    return Topology(
        name=name,
        num_ranks=len(ranks),
        nodes=Nodes(
            kind=np.array([node.kind for node in nodes], dtype=np.int8),
            reduces=np.array([node.kind == NodeKind.NVSWITCH for node in nodes], dtype=bool),
            names=tuple(node.name for node in nodes),
        ),
        links=Links(
            src=ints([number[one] for one, _, _ in found.links]),
            dst=ints([number[other] for _, other, _ in found.links]),
            bandwidth_Bps=np.array(list(found.links.values()), dtype=np.float64),
            latency_s=np.array([_LATENCY_S[kind] for kind in kinds], dtype=np.float64),
            kind=np.array(kinds, dtype=np.int8),
        ),
        routing=Shortest(),
        relays=False,
    )


_WRITTEN = {LinkKind.NVLINK, LinkKind.PCIE, LinkKind.INTER_SOCKET}


def to_nccl_xml(topology: Topology, *, capability: int = 90) -> str:
    """Returns the text of NCCL's topology file for a server.

    `capability` is the compute capability of the GPUs, which determines the rate of an NVLink.
    Raises `ValueError` for switches or links that a server does not have.

    >>> from unisono import topology
    >>> again = from_nccl_xml(to_nccl_xml(topology.dgx(8)))
    >>> again.num_ranks, again.num_links == topology.dgx(8).num_links
    (8, True)
    """
    return _SystemWriter(topology, capability).write()


class _SystemWriter:
    def __init__(self, topology: Topology, capability: int) -> None:
        if (topology.nodes.kind == NodeKind.SWITCH).any():
            raise ValueError(f"{topology.name}: NCCL's file cannot express network switches")
        others = set(topology.links.kind.tolist()) - _WRITTEN
        if others:
            kind = LinkKind(min(others)).name.lower()
            raise ValueError(f"{topology.name}: NCCL's file cannot express {kind} links")
        self.topology = topology
        self.capability = capability
        self.written: set[int] = set()

    def write(self) -> str:
        """Returns the text of the file."""
        root = Xml.Element("system", version="1")
        kinds = self.topology.nodes.kind
        sockets = np.flatnonzero(kinds == NodeKind.SOCKET).tolist()
        for numa, socket in enumerate(sockets or [-1]):
            cpu = Xml.SubElement(
                root, "cpu", numaid=str(numa), arch="x86_64", vendor="GenuineIntel",
                familyid="6", modelid="143",
            )  # fmt: skip
            self._below(cpu, socket)
            if socket < 0:
                for rank in range(self.topology.num_ranks):
                    self._device(cpu, rank, 12e9)
        Xml.indent(root)
        return Xml.tostring(root, encoding="unicode") + "\n"

    def _links(self, node: int, kind: LinkKind) -> Iterator[tuple[int, float]]:
        links = self.topology.links
        for link in np.flatnonzero((links.src == node) & (links.kind == kind)).tolist():
            yield int(links.dst[link]), float(links.bandwidth_Bps[link])

    def _below(self, element: Xml.Element, node: int) -> None:
        self.written.add(node)
        for child, rate in self._links(node, LinkKind.PCIE):
            if child not in self.written:
                self._device(element, child, rate)

    def _device(self, parent: Xml.Element, node: int, rate: float) -> None:
        speed, width = _lanes(rate)
        kind = NodeKind(self.topology.nodes.kind[node])
        code = {NodeKind.RANK: "0x030200", NodeKind.NIC: "0x020000"}.get(kind, "0x060400")
        pci = Xml.SubElement(
            parent, "pci", {"busid": _bus(node), "class": code},
            link_speed=f"{speed} GT/s PCIe", link_width=str(width),
        )  # fmt: skip
        self.written.add(node)
        if kind is NodeKind.RANK:
            self._gpu(pci, node)
        elif kind is NodeKind.NIC:
            name, mbps = self._card(node)
            card = int((self.topology.nodes.kind[:node] == NodeKind.NIC).sum())
            nic = Xml.SubElement(pci, "nic")
            Xml.SubElement(nic, "net", name=name, dev=str(card), speed=mbps, port="1", gdr="1")
        else:
            self._below(pci, node)

    def _gpu(self, pci: Xml.Element, rank: int) -> None:
        gpu = Xml.SubElement(
            pci, "gpu", dev=str(rank), sm=str(self.capability), rank=str(rank), gdr="1"
        )
        for peer, rate in self._links(rank, LinkKind.NVLINK):
            nvswitch_node = peer >= self.topology.num_ranks
            count = max(1, round(rate / 1e9 / _nvlink(self.capability)))
            code = NVSWITCH_CLASS if nvswitch_node else "0x030200"
            Xml.SubElement(gpu, "nvlink", target=_bus(peer), count=str(count), tclass=code)

    def _card(self, node: int) -> tuple[str, str]:
        names = self.topology.nodes.names
        match = re.fullmatch(r"(\S+) (\d+) Mbit/s", names[node]) if names else None
        first = int(np.argmax(self.topology.nodes.kind == NodeKind.NIC))
        return (match[1], match[2]) if match else (f"nic{node - first}", "400000")


def _bus(node: int) -> str:
    """Returns an artificial PCI address. Each node has its own bus."""
    domain, bus = divmod(node + 1, 256)
    return f"{domain:04x}:{bus:02x}:00.0"


def _lanes(rate: float) -> tuple[str, int]:
    """Returns the GT/s and the number of lanes of the PCIe link whose bandwidth is closest to
    `rate`. If several are equally close, prefers more lanes."""
    choices = [(speed, width) for width in (16, 8, 4, 2, 1) for speed in _SPEEDS]
    return min(choices, key=lambda c: abs(c[1] * _LANE[c[0]] / 80 * 1e9 - rate))
