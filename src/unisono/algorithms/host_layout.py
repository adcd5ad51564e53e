"""The distribution of ranks over hosts, and of a host's work over its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from unisono.algorithms.grid import near_square
from unisono.errors import UnsupportedError

Hosts: TypeAlias = tuple[tuple[int, ...], ...]
"""Ranks of each host. The hosts may be any partition of a group's ranks."""

FEW_HOSTS = 8
"""Largest number of hosts that exchange data in a single round. For more hosts, the number of
rounds is logarithmic.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayout:
    """A partition of ranks 0..n-1 into hosts. Ranks are in ascending order, and hosts are in the
    order of their first ranks.

    >>> layout = HostLayout.of(5, ((4, 1), (0, 2, 3)))
    >>> layout.hosts, layout.sizes, layout.host_of[4]
    (((0, 2, 3), (1, 4)), (3, 2), 1)
    """

    hosts: Hosts

    @classmethod
    def of(cls, ranks: int, hosts: Hosts | None) -> HostLayout:
        """Returns the layout of a group. By default, hosts have consecutive ranks and equal sizes,
        and the number of hosts is as close as possible to the size of a host.

        Raises `UnsupportedError` unless each rank is on exactly one host.
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
        """True if all hosts can exchange data in a single round (at most `FEW_HOSTS` hosts)."""
        return len(self.hosts) <= FEW_HOSTS

    @property
    def host_of(self) -> tuple[int, ...]:
        """Host number of each rank."""
        return self.on_hosts(range(len(self.hosts)))

    def on_hosts(self, values: Sequence[int]) -> tuple[int, ...]:
        """Returns a value for each rank: the value of the rank's host."""
        found = [0] * self.ranks
        for value, host in zip(values, self.hosts, strict=True):
            for rank in host:
                found[rank] = value
        return tuple(found)

    def root_host(self, root: int) -> int:
        """Returns the number of the host to which rank `root` belongs."""
        return next(h for h, host in enumerate(self.hosts) if root in host)

    def leaders(self, root: int | None = None) -> list[int]:
        """Returns the leader of each host: the root on the root's host, the first rank on every
        other host.
        """
        return [root if root is not None and root in host else host[0] for host in self.hosts]

    @property
    def columns(self) -> int:
        """Number of equal shares (columns) into which a vector is cut so that the ranks of each
        host have the most equal amounts of work.

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
        """Returns the rank of a host that processes a column. Each rank has adjacent columns."""
        ranks = self.hosts[host]
        return ranks[column * len(ranks) // columns]

    def worked(self, host: int, columns: int) -> list[list[int]]:
        """Returns the columns that each rank of the host processes."""
        found: dict[int, list[int]] = {rank: [] for rank in self.hosts[host]}
        for column in range(columns):
            found[self.worker(host, column, columns)].append(column)
        return list(found.values())

    def _busiest(self, columns: int) -> float:
        """Returns the imbalance of the least balanced host: the number of columns of its busiest
        rank, divided by its mean number of columns per rank.
        """
        return max(-(-columns // size) * size / columns for size in self.sizes)
