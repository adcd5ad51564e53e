"""Dragonfly and dragonfly+: groups of switches with links between all groups.

Sources: Kim, Dally, Scott, Abts, "Technology-driven, highly-scalable dragonfly topology" (ISCA
2008), sections 3 and 4; Shpiner et al., "Dragonfly+: Low cost topology for scaling datacenters"
(HiPINEB 2017). Links between groups rotate around the ring of groups, so all groups are equivalent
(the palmtree arrangement of Camarero, Vallejo, Beivide, 2014).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.topology.graph import Topology
from unisono.topology.ragged_lists import Floats, Ints, Ragged, pick
from unisono.topology.routing import Routing, along
from unisono.topology.wiring import NETWORK, Cable, Wiring, check_counts

MINIMAL, VALIANT = "minimal", "valiant"


@dataclass(frozen=True, slots=True)
class DragonflyGroups(Routing):
    """Groups of switches. There are `groups` groups of `switches` switches. Each switch has `hosts`
    ranks and `ports` links to other groups.

    In a dragonfly, the switches of a group are connected to each other. In a dragonfly+ (`plus`), a
    group also has `switches` spines, which are connected to all switches of the group and have the
    links to other groups. Minimal paths use one link between groups. Valiant paths go through an
    intermediate group that a hash chooses, which distributes any traffic pattern evenly.
    """

    groups: int
    switches: int
    hosts: int
    ports: int
    plus: bool = False
    valiant: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.groups * self.switches * self.hosts

    def group_ports(self) -> Ints:
        """Returns a table of the ports of a group, with the indices [offset, copy]. The ports in
        row d have links to the group whose number is larger by d, modulo the number of groups. The
        value -1 means no port.

        Port p belongs to switch p // ports, or to spine p // ports with `plus`.
        """
        ports = self.switches * self.ports
        others = self.groups - 1
        counts = np.zeros(self.groups, dtype=np.int64)
        if others:
            counts[1:] = ports // others
            left = ports % others
            # A link that has an offset as seen from one of its groups has the negative offset as
            # seen from the other. So both offsets get equal numbers of ports.
            for offset in range(1, (self.groups + 1) // 2):
                if left >= 2:
                    counts[[offset, self.groups - offset]] += 1
                    left -= 2
            if left and self.groups % 2 == 0:
                counts[self.groups // 2] += 1
        table = np.full((self.groups, int(counts.max(initial=1))), -1, dtype=np.int64)
        port = 0
        for copy in range(table.shape[1]):
            for offset in range(1, self.groups):
                if copy < counts[offset]:
                    table[offset, copy] = port
                    port += 1
        return table

    def routes(self, topology: Topology, src: Ints, dst: Ints, seed: int) -> Ragged:
        """Implements `Topology.routes`."""
        up, down = src // self.hosts, dst // self.hosts
        here, target = up // self.switches, down // self.switches
        stops = [src, np.where(src == dst, src, self.num_ranks + up)]
        via = target
        if self.valiant and self.groups > 2:
            two = np.sort(np.stack([here, target]), axis=0)
            via = pick(self.groups - 2, src, dst, seed)
            via = via + (via >= two[0])
            via = np.where(here == target, target, via + (via >= two[1]))
        stops += self._hop(here, via, src, dst, seed, stops[-1], 1)
        stops += self._hop(via, target, src, dst, seed, stops[-1], 2)
        last = np.where(src == dst, src, self.num_ranks + down)
        if self.plus:
            # A path between two leaves of a group needs a spine.
            low = (stops[-1] < self._first_spine) & (stops[-1] != last)
            spine = self._spine(target, pick(self.switches, src, dst, seed, 3))
            stops.append(np.where(low, spine, stops[-1]))
        stops += [last, dst]
        return along(topology, np.stack(stops, axis=1), src, dst, seed)

    @property
    def _first_spine(self) -> int:
        return self.num_ranks + self.groups * self.switches

    def _spine(self, group: Ints, number: Ints) -> Ints:
        return self._first_spine + group * self.switches + number

    def _hop(
        self, here: Ints, there: Ints, src: Ints, dst: Ints, seed: int, at: Ints, leg: int
    ) -> list[Ints]:
        """Returns the nodes on the path from node `at` in group `here` to group `there`."""
        table = self.group_ports()
        go = here != there
        offset = np.where(go, (there - here) % self.groups, 1 % self.groups)
        copies = np.maximum((table[offset] >= 0).sum(axis=1), 1)
        copy = pick(copies, src, dst, seed, leg)
        out = table[offset, copy] // self.ports
        into = table[-offset % self.groups, copy] // self.ports
        first = self._first_spine if self.plus else self.num_ranks
        leave, enter = (first + g * self.switches + d for g, d in ((here, out), (there, into)))
        stops = []
        if self.plus:
            # A path between two spines of a group goes through a leaf.
            turned = go & (at >= self._first_spine) & (at != leave)
            leaf = here * self.switches + pick(self.switches, src, dst, seed, leg + 8)
            stops.append(np.where(turned, self.num_ranks + leaf, at))
        return [*stops, np.where(go, leave, at), np.where(go, enter, at)]

    def representatives(self, topology: Topology) -> tuple[Ints, Floats]:
        """Returns the first rank of each switch of group 0. These ranks represent all other
        ranks."""
        first = np.arange(self.switches) * self.hosts
        return first, np.full(len(first), float(self.groups * self.hosts))

    def bisection_sides(self, topology: Topology) -> Ints:
        """Returns the cut into two halves of the groups. If the number of groups is odd, one side
        has one group more.
        """
        first = self.num_ranks
        side = np.full(topology.num_nodes, -1, dtype=np.int64)
        switches = self.groups * self.switches
        whole = self.switches if self.groups > 1 else 1
        high = (np.arange(switches) // whole >= switches // whole // 2).astype(np.int64)
        side[:first] = np.repeat(high, self.hosts)
        side[first : first + switches] = high
        if self.plus:
            side[first + switches :] = high
        return side


def dragonfly(
    a: int,
    p: int,
    h: int,
    *,
    groups: int | None = None,
    routing: str = MINIMAL,
    cable: Cable = NETWORK,
    far: Cable | None = None,
) -> Topology:
    """Builds a dragonfly. Each group has `a` switches with `p` ranks and `h` links to other groups
    each.

    The default of `groups` is the maximum, a h + 1. `far` describes the links between groups.
    `routing` is "minimal" or "valiant". Raises `ValueError` for more groups than the maximum.

    >>> small = dragonfly(4, 2, 2)
    >>> small.num_ranks, small.num_links, small.diameter()
    (72, 162, 5)
    """
    groups = a * h + 1 if groups is None else groups
    check_counts("dragonfly", a=a, p=p, h=h, groups=groups)
    _check_groups("dragonfly", groups, most=a * h + 1)
    full = "" if groups == a * h + 1 else f",groups={groups}"
    name = f"dragonfly:a={a},p={p},h={h}{full}{_suffix(routing)}"
    return _build(name, DragonflyGroups(groups, a, p, h, False, routing == VALIANT), cable, far)


def dragonfly_plus(
    k: int,
    *,
    groups: int | None = None,
    routing: str = MINIMAL,
    cable: Cable = NETWORK,
    far: Cable | None = None,
) -> Topology:
    """Builds a dragonfly+. Each group has k/2 leaves and k/2 spines with k ports each.

    Half of a leaf's ports have links to ranks. Half of a spine's ports have links to other groups.
    The default of `groups` is the maximum, k^2/4 + 1. Raises `ValueError` for an odd k, for more
    groups than the maximum, or for a routing other than "minimal" and "valiant".

    >>> small = dragonfly_plus(4)
    >>> small.num_ranks, small.num_links, small.diameter()
    (20, 50, 5)
    """
    half = k // 2
    if k % 2:
        raise ValueError(f"dragonfly_plus: expected an even k, got {k}")
    groups = half * half + 1 if groups is None else groups
    check_counts("dragonfly_plus", k=k, groups=groups)
    _check_groups("dragonfly_plus", groups, most=half * half + 1)
    full = "" if groups == half * half + 1 else f",groups={groups}"
    name = f"dragonfly_plus:k={k}{full}{_suffix(routing)}"
    return _build(
        name, DragonflyGroups(groups, half, half, half, True, routing == VALIANT), cable, far
    )


def _suffix(routing: str) -> str:
    if routing not in (MINIMAL, VALIANT):
        raise ValueError(f"routing: expected {MINIMAL} or {VALIANT}, got {routing}")
    return "" if routing == MINIMAL else f",routing={routing}"


def _build(name: str, shape: DragonflyGroups, near: Cable, far: Cable | None) -> Topology:
    wiring = Wiring(num_ranks=shape.num_ranks)
    ranks = np.arange(shape.num_ranks)
    leaves = wiring.add(shape.groups * shape.switches).reshape(shape.groups, shape.switches)
    outer_switches = leaves
    wiring.join(ranks, leaves.ravel()[ranks // shape.hosts], near)
    if shape.plus:
        outer_switches = wiring.add(leaves.size).reshape(leaves.shape)
        wiring.join(leaves[:, :, None], outer_switches[:, None, :], near)
    else:
        one, other = np.triu_indices(shape.switches, 1)
        wiring.join(leaves[:, one], leaves[:, other], near)
    table = shape.group_ports()
    group = np.arange(shape.groups)
    for offset in range(1, shape.groups // 2 + 1):
        # With an offset of half the groups, each link occurs twice, once for each of its groups;
        # add it once.
        start = group[: shape.groups // 2] if 2 * offset == shape.groups else group
        there = (start + offset) % shape.groups
        for out, into in zip(table[offset], table[-offset], strict=True):
            if out >= 0:
                one, other = (
                    outer_switches[start, out // shape.ports],
                    outer_switches[there, into // shape.ports],
                )
                wiring.join(one, other, far or near)
    return wiring.build(name, shape)


def _check_groups(name: str, groups: int, *, most: int) -> None:
    if groups > most:
        raise ValueError(f"{name}: expected at most {most} groups, got {groups}")
