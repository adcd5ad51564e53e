"""Placement of ranks on the hosts of a lab, and the bytes that the busiest host must send or
receive in an operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.bench.cases import Case
from unisono.bench.lab import Lab

PORT = 29_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A lab with the same number of ranks on every host. Consecutive ranks are on the same host,
    beginning with host 0."""

    lab: Lab
    per_host: int = 1
    port: int = PORT
    """TCP port on host 0 for the rendezvous of one contestant."""

    @property
    def ranks(self) -> int:
        return self.lab.hosts * self.per_host

    @property
    def rendezvous(self) -> str:
        """URL of the rendezvous, which torch and Unisono accept."""
        return f"tcp://{self.lab.address(0)}:{self.port}"

    @property
    def interfaces(self) -> str:
        """Network interfaces of all rails, in the format that Gloo and Open MPI accept."""
        return ",".join(f"eth{rail}" for rail in range(self.lab.rails))

    def host(self, rank: int) -> int:
        """Returns the host of a rank."""
        return rank // self.per_host

    def to_dict(self) -> dict[str, Any]:
        """Returns the properties of the cluster for JSON."""
        lab = self.lab
        shape = {"hosts": lab.hosts, "per_host": self.per_host, "rails": lab.rails}
        return {**shape, "rate": lab.rate, "delay": lab.delay}


def network_bytes(case: Case, hosts: int) -> float:
    """Returns the bytes that the busiest host must send or receive even with the best schedule.

    A host counts as one rank, because it can reduce or copy its ranks' data before it sends. An
    exception is all_to_all, because no two ranks need the same data. For messages between pairs,
    each pair on different hosts counts as one message.

    >>> network_bytes(Case(op="all_reduce", ranks=4, nbytes=1000), hosts=2)
    1000.0
    """
    if case.operation.paired:
        return float(case.size_bytes * (case.ranks // hosts % 2))
    if case.operation.uneven:
        return float(_uneven_count(case, hosts) * case.storage.itemsize)
    factor = case.ranks / hosts if case.op == "all_to_all" else 1
    return case.operation.bus_factor(hosts) * case.size_bytes * factor


def _uneven_count(case: Case, hosts: int) -> int:
    """Returns the result of `network_bytes` for a v-collective, in elements instead of bytes. A
    host sends or receives all elements except those of its own ranks. The busiest host is the
    root's host or, without a root, the host with the fewest elements."""
    per_host = case.ranks // hosts
    groups = [range(host * per_host, (host + 1) * per_host) for host in range(hosts)]
    if case.op == "all_to_all_v":
        within = [sum(case.lengths(s)[d] for s in group for d in group) for group in groups]
        return per_host * case.count - min(within)
    if case.operation.rooted:
        groups = [groups[case.root // per_host]]
    return case.count - min(sum(case.shares[rank] for rank in group) for group in groups)
