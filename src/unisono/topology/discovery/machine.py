"""The cores and devices of a machine, and the machine's topology."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from unisono.topology.discovery.gpus import NvLinks, nvlinks
from unisono.topology.graph import LinkKind, NodeKind, Topology
from unisono.topology.ragged_lists import ints
from unisono.topology.routing import Shortest
from unisono.topology.wiring import PCIE, SOCKETS, Cable, Wiring

CORE = Cable(bandwidth_Bps=10e9, latency_s=100e-9, kind=LinkKind.SHARED_MEMORY)
"""Link of a core that copies through memory; an estimate, not a measurement."""
NVLINK_LINK_BPS = 25e9
"""One NVLink of generation 2 to 4, in one direction."""
_UNKNOWN_LANES_BPS = 15.75e9
"""Rate of a PCIe link of unknown rate, as in virtual machines: the rate of generation 3 with 16
lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU or a network card.

    `path` lists the bridges from the root down to the device, and the device itself. Each entry is
    an address and the rate of the link above (None if unknown). `rate_Bps` is the rate of a card's
    network, if known.
    """

    address: str
    name: str
    gpu: bool
    numa: int
    path: tuple[tuple[str, float | None], ...]
    rate_Bps: float | None = None

    @property
    def title(self) -> str:
        """Name of the device, with the network's rate if known."""
        rate = "" if self.rate_Bps is None else f" {self.rate_Bps * 8 / 1e6:.0f} Mbit/s"
        return self.name + rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Cores and PCIe devices of a machine. `cores` maps the first CPU of each core to its NUMA
    node."""

    cores: Mapping[int, int]
    devices: tuple[Device, ...]

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs, by address."""
        return tuple(device for device in self.devices if device.gpu)

    @property
    def cards(self) -> tuple[Device, ...]:
        """The network cards, by address."""
        return tuple(device for device in self.devices if not device.gpu)

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """The NUMA nodes that have cores or devices."""
        return tuple(sorted({*self.cores.values(), *(device.numa for device in self.devices)}))

    def topology(self, links: NvLinks | None = None) -> Topology:
        """Returns the machine's topology. The ranks are the GPUs, or the cores of a machine without
        GPUs.

        `links` are NVLinks, as `gpus.nvlinks` returns them. Bridges with a single child are not
        switches. Raises `ValueError` for a machine without cores and GPUs.
        """
        if not self.cores and not self.gpus:
            raise ValueError("expected cores or GPUs, found neither")
        wiring = Wiring(num_ranks=len(self.gpus) or len(self.cores))
        sockets = dict(
            zip(
                self.numa_nodes,
                wiring.add(len(self.numa_nodes), NodeKind.SOCKET).tolist(),
                strict=True,
            )
        )
        names = [f"cpu{node}" for node in self.numa_nodes]
        ranks = (
            [f"core{cpu}" for cpu in self.cores] if not self.gpus else [g.name for g in self.gpus]
        )
        ends = list(sockets.values())
        for i, one in enumerate(ends):
            for other in ends[i + 1 :]:
                wiring.join(ints([one]), ints([other]), SOCKETS)
        if not self.gpus:
            for rank, node in enumerate(self.cores.values()):
                wiring.join(ints([rank]), ints([sockets[node]]), CORE)
        names += self._add_devices(wiring, sockets)
        names += self._add_nvlinks(wiring, links or {})
        wiring.names = ranks + names
        return wiring.build("this machine", Shortest())

    def _add_devices(self, wiring: Wiring, sockets: dict[int, int]) -> list[str]:
        """Adds the PCIe trees. Returns the names of the added nodes."""
        below: dict[str, set[str]] = defaultdict(set)
        for device in self.devices:
            for (address, _), (child, _) in pairwise(device.path):
                below[address].add(child)
        bridges: dict[str, int] = {}
        names = []
        for rank_or_card, device in enumerate((*self.gpus, *self.cards)):
            above, slowest = sockets[device.numa], float("inf")
            for address, rate in device.path:
                slowest = min(slowest, rate or _UNKNOWN_LANES_BPS)
                last = address == device.path[-1][0]
                if not last and len(below[address]) < 2:
                    continue
                node = bridges.get(address)
                if node is None:
                    if last and device.gpu:
                        node = rank_or_card
                    else:
                        kind = NodeKind.NIC if last else NodeKind.PCIE_SWITCH
                        node = int(wiring.add(1, kind)[0])
                        names.append(device.title if last else address)
                    bridges[address] = node
                    cable = Cable(
                        bandwidth_Bps=slowest, latency_s=PCIE.latency_s, kind=LinkKind.PCIE
                    )
                    wiring.join(ints([node]), ints([above]), cable)
                above, slowest = node, float("inf")
        return names

    def _add_nvlinks(self, wiring: Wiring, links: NvLinks) -> list[str]:
        """Adds NVLinks between GPUs, and from GPUs to one NVSwitch. Returns the names of added
        nodes.
        """
        rank_of = {gpu.address: rank for rank, gpu in enumerate(self.gpus)}
        nvswitch_node = None
        for address, targets in links.items():
            rank, uplinks = rank_of.get(address), 0
            if rank is None:
                continue
            for target, count in targets.items():
                peer = rank_of.get(target)
                uplinks += count if peer is None else 0
                if peer is not None and rank < peer:
                    wiring.join(ints([rank]), ints([peer]), _nvlink(count))
            if uplinks:
                nvswitch_node = (
                    wiring.add(1, NodeKind.NVSWITCH, reduces=True)
                    if nvswitch_node is None
                    else nvswitch_node
                )
                wiring.join(ints([rank]), nvswitch_node, _nvlink(uplinks))
        return [] if nvswitch_node is None else ["nvswitch"]


def discover(root: Path = Path("/sys")) -> Topology:
    """Returns this machine's topology, read from sysfs. NVLinks are read from NVML.

    >>> discover().num_ranks > 0
    True
    """
    from unisono.topology.discovery.sysfs import survey

    return survey(root).topology(nvlinks())


def _nvlink(count: int) -> Cable:
    return Cable(bandwidth_Bps=count * NVLINK_LINK_BPS, latency_s=200e-9, kind=LinkKind.NVLINK)
