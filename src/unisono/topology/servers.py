"""Topologies of servers: GPUs on NVSwitches, on PCIe trees, or on both, with network cards.

Sources: NVIDIA, "DGX A100 System Architecture" (2020) and "NVIDIA Hopper Architecture In-Depth"
(2022), for the connections and the rates of the links.
"""

from __future__ import annotations

import numpy as np

from unisono.topology.graph import NodeKind, Topology
from unisono.topology.ragged_lists import Ints
from unisono.topology.routing import Shortest
from unisono.topology.wiring import NVLINK, PCIE, SOCKETS, Cable, Wiring, check_counts


def nvswitch(
    gpus: int = 8,
    *,
    switches: int = 1,
    links: int = 1,
    cable: Cable = NVLINK,
    reduces: bool = True,
) -> Topology:
    """Builds a server of GPUs and NVSwitches. The `links` NVLinks of each GPU are distributed round
    robin over the NVSwitches.

    `cable` has the bandwidth of all links of a GPU together. A message uses one link. With
    `reduces`, switches can reduce the messages that pass (NVLS). Raises `ValueError` if a GPU has
    fewer links than the number of switches.

    >>> nvswitch(8).diameter(), nvswitch(8).bisection_Bps() / 1e9
    (2, 1800.0)
    >>> nvswitch(8, switches=4, links=18).num_links
    144
    """
    check_counts("nvswitch", gpus=gpus, switches=switches, links=links)
    if links < switches:
        raise ValueError(f"nvswitch: expected at least {switches} links of a GPU, got {links}")
    wiring = Wiring(num_ranks=gpus)
    nvswitch_nodes = wiring.add(switches, NodeKind.NVSWITCH, reduces=reduces)
    _join_nvswitches(wiring, np.arange(gpus), nvswitch_nodes, links, cable)
    name = f"nvswitch:{gpus}"
    if links > 1 or switches > 1:
        name = f"nvswitch:gpus={gpus},switches={switches},links={links}"
    return wiring.build(name, Shortest())


def pcie_server(
    *,
    sockets: int = 2,
    switches: int = 2,
    gpus: int = 2,
    nics: int = 1,
    cable: Cable = PCIE,
) -> Topology:
    """Builds a server whose GPUs and network cards are on PCIe switches. Each socket has PCIe
    switches, and all sockets are connected.

    `switches` is the number of PCIe switches per socket. `gpus` and `nics` are the numbers of GPUs
    and network cards per PCIe switch.

    >>> server = pcie_server()
    >>> server.num_ranks, server.diameter()
    (8, 5)
    """
    check_counts("pcie_server", sockets=sockets, switches=switches, gpus=gpus)
    wiring = Wiring(num_ranks=sockets * switches * gpus)
    _tree(wiring, sockets, switches, gpus, nics, cable)
    name = f"pcie_server:sockets={sockets},switches={switches},gpus={gpus},nics={nics}"
    return wiring.build(name, Shortest())


def dgx(
    gpus: int = 8,
    *,
    sockets: int = 2,
    per_switch: int = 2,
    cable: Cable = NVLINK,
    pcie: Cable = PCIE,
    reduces: bool = True,
) -> Topology:
    """Builds a DGX-like server of GPUs on one NVSwitch, with one network card per GPU on the same
    PCIe switch.

    `per_switch` GPUs share a PCIe switch. The PCIe switches are divided equally among the sockets.
    Raises `ValueError` if the division has a remainder.

    >>> dgx(8).num_ranks, dgx(8).diameter()
    (8, 2)
    """
    check_counts("dgx", gpus=gpus, sockets=sockets, per_switch=per_switch)
    if gpus % (sockets * per_switch):
        raise ValueError(f"dgx: expected a multiple of {sockets * per_switch} GPUs, got {gpus}")
    wiring = Wiring(num_ranks=gpus)
    nvswitch_node = wiring.add(1, NodeKind.NVSWITCH, reduces=reduces)
    _join_nvswitches(wiring, np.arange(gpus), nvswitch_node, 1, cable)
    _tree(wiring, sockets, gpus // (sockets * per_switch), per_switch, per_switch, pcie)
    shape = "" if (sockets, per_switch) == (2, 2) else f",sockets={sockets},per_switch={per_switch}"
    return wiring.build(f"dgx:gpus={gpus}{shape}", Shortest())


def _join_nvswitches(
    wiring: Wiring, gpus: Ints, nvswitch_nodes: Ints, links: int, cable: Cable
) -> None:
    share = cable.times(1 / links)
    for link in range(links):
        wiring.join(gpus, np.full(len(gpus), nvswitch_nodes[link % len(nvswitch_nodes)]), share)


def _tree(wiring: Wiring, sockets: int, switches: int, gpus: int, nics: int, cable: Cable) -> None:
    """Adds the PCIe tree of a server: sockets, then PCIe switches, then ranks and network cards."""
    roots = wiring.add(sockets, NodeKind.SOCKET)
    bridges = wiring.add(sockets * switches, NodeKind.PCIE_SWITCH)
    cards = wiring.add(len(bridges) * nics, NodeKind.NIC)
    one, other = np.triu_indices(sockets, 1)
    wiring.join(roots[one], roots[other], SOCKETS)
    wiring.join(bridges, np.repeat(roots, switches), cable)
    wiring.join(np.arange(wiring.num_ranks), np.repeat(bridges, gpus), cable)
    wiring.join(cards, np.repeat(bridges, nics), cable)
