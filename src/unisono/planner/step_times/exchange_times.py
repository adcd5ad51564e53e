"""Times of exchanges on a flat network of domains, in closed form.

The time of a ring is a start-up time that grows with the ranks (alpha), plus a bandwidth term that
grows with the bytes (beta), as in Thakur, Rabenseifner and Gropp (2005). If a group spans several
domains, its network rate is the sum over its devices in one domain.
"""

from __future__ import annotations

from math import comb, log2
from typing import NamedTuple

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.device_cluster import Cluster


class GroupPlace(NamedTuple):
    """Position of a group in the cluster: the number of its ranks, the number of these in one
    domain, and the distance between neighbours in devices.
    """

    ranks: int
    local: int
    stride: int


class ExchangeTimes:
    """Computes times of exchanges in groups of a cluster. Sizes are bytes, times are seconds."""

    def __init__(self, cluster: Cluster, constants: CalibratedConstants) -> None:
        self._cluster = cluster
        self._domain = cluster.domain
        self._link_Bps = cluster.domain_Bps * constants.link_share
        self._network_Bps = cluster.between_Bps * constants.network_share
        self._expert_Bps = cluster.between_Bps * constants.exchange_share
        self._constants = constants
        self._known: dict[GroupPlace, tuple[float, float]] = {}

    def with_constants(self, constants: CalibratedConstants) -> ExchangeTimes:
        """Returns the exchanges of the same cluster with other constants."""
        return ExchangeTimes(self._cluster, constants)

    def place(self, ranks: int, stride: int) -> GroupPlace:
        """Returns the position of a group whose neighbours are `stride` devices apart."""
        return GroupPlace(ranks, max(min(ranks, self._domain // stride), 1), stride)

    def all_reduce_s(self, nbytes: float, group: GroupPlace) -> float:
        """Returns the time of an all_reduce of `nbytes` on each rank."""
        return self._ring_s(2 * nbytes, group)

    def gather_s(self, nbytes: float, group: GroupPlace) -> float:
        """Returns the time of an all_gather or reduce_scatter. `nbytes` is the size of the whole
        array, over all ranks.
        """
        return self._ring_s(nbytes, group) + self._round_start_s(group)

    def _ring_s(self, nbytes: float, group: GroupPlace) -> float:
        if group.ranks < 2:
            return 0.0
        start_s, byte_s = self._known_ring(group)
        return start_s + nbytes * byte_s

    def _known_ring(self, group: GroupPlace) -> tuple[float, float]:
        found = self._known.get(group)
        if found is None:
            found = self._known[group] = self.ring(group)
        return found

    def ring(self, group: GroupPlace) -> tuple[float, float]:
        """Returns the start-up time of a ring, and its time for each byte of an all_gather."""
        rate = self._link_Bps / self._sharing(group)
        if group.local < group.ranks:
            rate = min(rate, self._network_Bps * group.local)
        return self.start_s(group), (group.ranks - 1) / group.ranks / rate

    def _sharing(self, group: GroupPlace, *, scattered: bool = False) -> float:
        """Returns how many times longer messages inside a domain take, because the devices of a
        PCIe switch share its link to the rest of the host.

        All devices exchange at the same time. A ring leaves each switch once, and has as many
        members in a switch as the distance between neighbours allows. `scattered`: each member
        sends to all others.
        """
        switch, local = self._cluster.kind.pcie_switch, group.local
        same = switch // group.stride if self._cluster.kind.peer_access else 1
        same = max(min(same, local), 1)
        if switch < 2 or same == local:
            return 1.0
        leaving = (local - same) / (local - 1) if scattered else 1 / same
        return max(switch * leaving, 1.0)

    def link_use(self, group: GroupPlace) -> float:
        """Returns the rate of a group's ring as a share of the rate of a device's links.

        Compute beside a ring is slower because the ring moves bytes through the memory and the
        multiprocessors of the devices. A ring that waits for the network moves fewer in a second.
        """
        if group.ranks < 2:
            return 1.0
        byte_s = self._known_ring(group)[1]
        return min((group.ranks - 1) / group.ranks / self._link_Bps / byte_s, 1.0)

    def start_s(self, group: GroupPlace) -> float:
        """Returns the start-up time of a collective, which does not depend on the bytes. Between
        domains it is that of a tree.
        """
        constants = self._constants
        inside = constants.link_start_s + constants.link_rank_s * (group.local - 1)
        domains = group.ranks / group.local
        return inside + constants.network_start_s * (log2(domains) if domains > 1 else 0.0)

    def _round_start_s(self, group: GroupPlace) -> float:
        """Returns the start-up time of a ring beyond that of a tree. Trees only serve an
        all_reduce. A ring has a round for each other rank: one between each two domains, and all
        others inside of domains.
        """
        domains = group.ranks / group.local
        if domains <= 1:
            return 0.0
        between = domains - 1 - log2(domains)
        inside = (domains - 1) * (group.local - 1)
        return self._constants.network_start_s * between + self._constants.round_s * inside

    def route_s(
        self, nbytes: float, copies: int, group: GroupPlace, *, groups: int = 1, limit: int = 1
    ) -> float:
        """Returns the time in which each rank sends `nbytes` of tokens to each of `copies` random
        ranks. The ranks of a token are in `limit` of `groups` equal parts of all ranks.

        A token is sent once to each domain that has at least one of its experts, and inside the
        domain once to each rank that has at least one (as in DeepEP). Links inside and between
        domains work at the same time.
        """
        if group.ranks < 2:
            return 0.0
        domains = group.ranks / group.local
        received = reached_ranks(group.ranks, copies, groups, limit)
        inside_s = nbytes * received * (1 - 1 / group.local) / self._link_Bps
        inside_s *= self._sharing(group, scattered=True)
        reached = reached_ranks(domains, copies, groups, limit) * (1 - 1 / domains)
        outside_s = nbytes * reached / self._expert_Bps
        return self.start_s(group) + max(inside_s, outside_s)

    def all_to_all_s(self, nbytes: float, group: GroupPlace) -> float:
        """Returns the time in which each rank sends `nbytes`, in equal parts to all other ranks.

        Links inside and between domains work at the same time.
        """
        if group.ranks < 2:
            return 0.0
        others = group.ranks - 1
        inside_s = nbytes * (group.local - 1) / others / self._link_Bps
        inside_s *= self._sharing(group, scattered=True)
        outside_s = nbytes * (group.ranks - group.local) / others / self._expert_Bps
        return self.start_s(group) + max(inside_s, outside_s)

    def send_s(self, nbytes: float, stride: int) -> float:
        """Returns the time of a message to a device that is `stride` devices away."""
        constants = self._constants
        if stride < self._domain:
            sharing = self._sharing(GroupPlace(2, 2, stride))
            return constants.link_start_s / 2 + sharing * nbytes / self._link_Bps
        return constants.network_start_s + nbytes / self._network_Bps


def reached_ranks(ranks: float, copies: int, groups: int = 1, limit: int = 1) -> float:
    """Returns the mean number of different ranks that `copies` independent random choices reach.

    The choices are among the ranks of `limit` random groups of `groups`. A group has several ranks,
    or a rank has several groups.

    >>> reached_ranks(2, 2), reached_ranks(8, 1000, groups=8, limit=4)
    (1.5, 4.0)
    """
    if limit >= groups:
        return ranks * (1 - (1 - 1 / ranks) ** copies)
    if ranks >= groups:
        return reached_ranks(ranks * limit / groups, copies)
    held, found = round(groups / ranks), 0.0
    for chosen in range(1, min(held, limit) + 1):
        ways = comb(held, chosen) * comb(groups - held, limit - chosen)
        found += ways / comb(groups, limit) * (1 - (1 - chosen / limit) ** copies)
    return ranks * found


def exchange_times(cluster: Cluster, constants: CalibratedConstants) -> ExchangeTimes:
    """Returns the model of a cluster's exchange times: a simulation if it has a topology."""
    if cluster.topology is None:
        return ExchangeTimes(cluster, constants)
    from unisono.planner.step_times.simulated_exchanges import SimulatedExchanges

    return SimulatedExchanges(cluster, constants)
