"""Networks with levels of switches: star, leaf-spine, fat-trees, rails.

Sources: Al-Fares, Loukissas, Vahdat, "A scalable, commodity data center network architecture"
(SIGCOMM 2008), section 3 (k-ary fat-tree); Wang et al., "Rail-only: A low-cost high-performance
network for training LLMs with trillion parameters" (2023), section 2 (rails).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.topology.graph import Topology
from unisono.topology.ragged_lists import Floats, Ints, Ragged, ints, pick
from unisono.topology.routing import Routing, along
from unisono.topology.wiring import NETWORK, Cable, Wiring, check_counts


@dataclass(frozen=True, slots=True)
class Clos(Routing):
    """A tree of switches with up/down routing: up to the lowest common level, then down. A hash
    chooses among spines and among cores.

    The network has `pods` pods. Each pod has `leaves` leaf switches with `hosts` ranks each, and
    `spines` spine switches. Spine s of every pod has a link to each of the `cores` core switches of
    plane s. Node numbers of switches begin with the leaves, then come spines, then cores, each
    ordered by pod or plane. If `rails` is above 1, consecutive ranks are distributed round robin
    over `rails` leaves. Otherwise the ranks of a leaf are consecutive.
    """

    pods: int
    leaves: int
    hosts: int
    spines: int
    cores: int
    rails: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.pods * self.leaves * self.hosts

    def leaf_of(self, rank: Ints) -> Ints:
        """Returns the number of each rank's leaf, from 0 on."""
        unit = rank // (self.hosts * self.rails)
        return ints(unit * self.rails + rank % self.rails)

    def routes(self, topology: Topology, src: Ints, dst: Ints, seed: int) -> Ragged:
        """Implements `Topology.routes`."""
        first_leaf = self.num_ranks
        first_spine = first_leaf + self.pods * self.leaves
        first_core = first_spine + self.pods * self.spines
        up, down = self.leaf_of(src), self.leaf_of(dst)
        pod_up, pod_down = up // self.leaves, down // self.leaves
        spine = pick(max(self.spines, 1), src, dst, seed)
        core = spine * self.cores + pick(max(self.cores, 1), src, dst, seed, 1)
        same, low, mid = src == dst, up == down, pod_up == pod_down
        leaf_up = np.where(same, src, first_leaf + up)
        leaf_down = np.where(same, src, first_leaf + down)
        spine_up = np.where(low, leaf_up, first_spine + pod_up * self.spines + spine)
        spine_down = np.where(low, leaf_down, first_spine + pod_down * self.spines + spine)
        top = np.where(mid, spine_up, first_core + core)
        stops = [src, leaf_up, spine_up, top, spine_down, leaf_down, dst]
        return along(topology, np.stack(stops, axis=1), src, dst, seed)

    def representatives(self, topology: Topology) -> tuple[Ints, Floats]:
        """Returns rank 0, which represents all ranks."""
        return np.zeros(1, dtype=np.int64), np.full(1, float(topology.num_ranks))

    def bisection_sides(self, topology: Topology) -> Ints:
        """Returns the cut through the middle. Several pods are cut into two halves of the pods, and
        a single pod into two halves of its leaves. With only one leaf, or one per rail, the ranks
        of each leaf are cut into two halves."""
        leaves = self.pods * self.leaves
        side = np.full(topology.num_nodes, -1, dtype=np.int64)
        rank = np.arange(self.num_ranks)
        if leaves == self.rails:
            # Each leaf has ranks on both sides, so the cut goes through the links of ranks, not
            # through the links of spines.
            side[:] = 0
            # All switches are on side 0, which has the larger half of the ranks.
            side[rank] = rank // self.rails >= (self.hosts + 1) // 2
            return side
        whole = self.leaves if self.pods > 1 else self.rails
        cut = leaves // whole // 2 * whole
        high = np.arange(leaves) >= cut
        side[rank] = high[self.leaf_of(rank)]
        side[self.num_ranks : self.num_ranks + leaves] = high
        if self.pods > 1:
            first = self.num_ranks + leaves
            pod = np.arange(self.pods * self.spines) // self.spines
            side[first : first + len(pod)] = pod >= self.pods // 2
        return side


def star(ranks: int, *, cable: Cable = NETWORK, reduces: bool = False) -> Topology:
    """Builds a star: one switch with links to all ranks.

    >>> star(8).num_links, star(8).diameter()
    (8, 2)
    """
    check_counts("star", ranks=ranks)
    return _build(f"star:{ranks}", Clos(1, 1, ranks, 0, 0), cable, cable, reduces)


def leaf_spine(
    *,
    leaves: int,
    spines: int,
    hosts: int,
    oversubscription: float | None = None,
    cable: Cable = NETWORK,
    reduces: bool = False,
) -> Topology:
    """Builds `leaves` leaf switches with `hosts` ranks each, and links from every leaf to every
    spine.

    By default, links to spines have the bandwidth of the other links. `oversubscription` is the
    ratio of a leaf's bandwidth to its ranks to its bandwidth to the spines.

    >>> leaf_spine(leaves=4, spines=2, hosts=2).diameter()
    4
    """
    check_counts("leaf_spine", leaves=leaves, spines=spines, hosts=hosts)
    above = cable
    if oversubscription is not None:
        _check_ratio("leaf_spine", oversubscription)
        above = cable.times(hosts / (spines * oversubscription))
    name = f"leaf_spine:leaves={leaves},spines={spines},hosts={hosts}"
    if oversubscription is not None:
        name += f",oversubscription={oversubscription:g}"
    return _build(name, Clos(1, leaves, hosts, spines, 0), cable, above, reduces)


def fat_tree(
    k: int,
    *,
    levels: int = 3,
    oversubscription: float = 1,
    cable: Cable = NETWORK,
    reduces: bool = False,
) -> Topology:
    """Builds a fat-tree of switches with k ports, with k^3/4 ranks for 3 levels and k^2/2 ranks for
    2 levels.

    An `oversubscription` of r removes switches above the leaves: a leaf has links to k/2 ranks and
    to k/(2 r) spines. Raises `ValueError` if k is odd or r does not divide k/2.

    >>> fat_tree(4).num_ranks, fat_tree(4).diameter(), fat_tree(4, levels=2).num_ranks
    (16, 6, 8)
    """
    check_counts("fat_tree", k=k)
    _check_ratio("fat_tree", oversubscription)
    half = k // 2
    up = round(half / oversubscription)
    if k % 2:
        raise ValueError(f"fat_tree: expected an even k, got {k}")
    if levels not in (2, 3):
        raise ValueError(f"fat_tree: expected 2 or 3 levels, got {levels}")
    if up < 1 or abs(up * oversubscription - half) > 1e-9:
        raise ValueError(
            f"fat_tree: oversubscription must divide k/2 = {half}, got {oversubscription:g}"
        )
    name = f"fat_tree:k={k}" + (f",levels={levels}" if levels != 3 else "")
    name += f",oversubscription={oversubscription:g}" if oversubscription != 1 else ""
    shape = Clos(1, k, half, up, 0) if levels == 2 else Clos(k, half, half, up, half)
    return _build(name, shape, cable, cable, reduces)


def rails(
    *, hosts: int, rails: int, spines: int = 0, unit: int = 0, cable: Cable = NETWORK
) -> Topology:
    """Builds a network for hosts with several network cards. Card i of each host has a link to the
    leaf of rail i.

    Endpoint h * rails + i is card i of host h. Each group of `unit` hosts has its own leaves; with
    0, all hosts form one group. `spines` switches connect all leaves; 0 means full bisection
    bandwidth. Raises `ValueError` unless `hosts` is a multiple of `unit`.

    >>> small = rails(hosts=4, rails=2)
    >>> small.num_ranks, small.diameter()
    (8, 4)
    """
    unit = unit or hosts
    check_counts("rails", hosts=hosts, rails=rails, unit=unit)
    if hosts % unit:
        raise ValueError(f"rails: expected a multiple of {unit} hosts, got {hosts}")
    name = f"rails:hosts={hosts},rails={rails}" + (f",unit={unit}" if unit != hosts else "")
    shape = Clos(1, hosts // unit * rails, unit, spines or unit, 0, rails)
    return _build(name, shape, cable, cable, False)


def _build(name: str, shape: Clos, below: Cable, above: Cable, reduces: bool) -> Topology:
    wiring = Wiring(num_ranks=shape.num_ranks)
    ranks = np.arange(shape.num_ranks)
    leaf = wiring.add(shape.pods * shape.leaves, reduces=reduces)
    spine = wiring.add(shape.pods * shape.spines, reduces=reduces)
    core = wiring.add(shape.spines * shape.cores, reduces=reduces)
    wiring.join(ranks, leaf[shape.leaf_of(ranks)], below)
    by_pod = leaf.reshape(shape.pods, shape.leaves, 1)
    spines = spine.reshape(shape.pods, 1, shape.spines)
    wiring.join(by_pod, spines, above)
    planes = core.reshape(1, shape.spines, shape.cores)
    wiring.join(spine.reshape(shape.pods, shape.spines, 1), planes, above)
    return wiring.build(name, shape)


def _check_ratio(name: str, ratio: float) -> None:
    if not ratio > 0:
        raise ValueError(f"{name}: expected a positive oversubscription, got {ratio:g}")
