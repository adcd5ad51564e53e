"""The distribution of ranks over hosts, and of a host's work over its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from unisono.algorithms.grid import near_square
from unisono.errors import UnsupportedError

Hosts: TypeAlias = tuple[tuple[int, ...], ...]
"""The ranks of each host: any partition of a group's ranks."""

FEW_HOSTS = 8
"""Largest number of hosts that all exchange in one round. More hosts use a logarithm of rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayout:
    """A partition of ranks 0..n-1 into hosts. Ranks ascend, and hosts ascend by their first rank.

    >>> layout = HostLayout.of(5, ((4, 1), (0, 2, 3)))
    >>> layout.hosts, layout.sizes, layout.host_of[4]
    (((0, 2, 3), (1, 4)), (3, 2), 1)
    """

    hosts: Hosts

    @classmethod
    def of(cls, ranks: int, hosts: Hosts | None) -> HostLayout:
        """Returns the layout of a group. The default is consecutive ranks on hosts as equal as
        possible.

        Raises `UnsupportedError` if some rank is on no host, or on two hosts.
        """
        if hosts is None:
            each, count = near_square(ranks, 2)
            return cls(hosts=tuple(tuple(range(h * each, (h + 1) * each)) for h in range(count)))
        if sorted(chain(*hosts)) != list(range(ranks)) or not all(hosts):
            raise UnsupportedError(
                f"hosts: expected each of the ranks 0 to {ranks - 1} on one host, got {hosts}"
            )
        return cls(hosts=tuple(sorted(tuple(sorted(host)) for host in hosts)))

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of ranks on each host."""
        return tuple(map(len, self.hosts))

    @property
    def regular(self) -> bool:
        """True if all hosts have the same number of ranks."""
        return len(set(self.sizes)) == 1

    @property
    def shared(self) -> bool:
        """True if some host has more than one rank."""
        return max(self.sizes) > 1

    @property
    def few(self) -> bool:
        """True if all hosts may exchange in one round."""
        return len(self.hosts) <= FEW_HOSTS

    @property
    def host_of(self) -> tuple[int, ...]:
        """The number of the host of each rank."""
        return self.on_hosts(range(len(self.hosts)))

    def on_hosts(self, values: Sequence[int]) -> tuple[int, ...]:
        """Returns, for each rank, the value of its host."""
        found = [0] * self.ranks
        for value, host in zip(values, self.hosts, strict=True):
            for rank in host:
                found[rank] = value
        return tuple(found)

    def root_host(self, root: int) -> int:
        """Returns the number of a rank's host."""
        return next(h for h, host in enumerate(self.hosts) if root in host)

    def leaders(self, root: int | None = None) -> list[int]:
        """Returns one rank of each host: the root on its host, else the first rank."""
        return [root if root is not None and root in host else host[0] for host in self.hosts]

    @property
    def columns(self) -> int:
        """Number of equal shares of a vector that balances the work of each host's ranks best.

        With this number, `worker` gives each rank at least one share. The number is between the
        size of the largest host and twice that size.

        >>> HostLayout.of(8, ((0, 1, 2, 3), (4, 5, 6, 7))).columns, HostLayout.of(5, None).columns
        (4, 5)
        >>> HostLayout.of(5, ((0, 1, 2), (3, 4))).columns
        6
        """
        most = max(self.sizes)
        return min(range(most, 2 * most + 1), key=lambda columns: (self._busiest(columns), columns))

    def worker(self, host: int, column: int, columns: int) -> int:
        """Returns the rank of a host that works on a column. A rank works on adjacent columns."""
        ranks = self.hosts[host]
        return ranks[column * len(ranks) // columns]

    def worked(self, host: int, columns: int) -> list[list[int]]:
        """Returns the columns of each rank of a host."""
        found: dict[int, list[int]] = {rank: [] for rank in self.hosts[host]}
        for column in range(columns):
            found[self.worker(host, column, columns)].append(column)
        return list(found.values())

    def _busiest(self, columns: int) -> float:
        """Returns the largest ratio of a host's busiest rank to the host's mean."""
        return max(-(-columns // size) * size / columns for size in self.sizes)
