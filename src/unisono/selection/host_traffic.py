"""Traffic of a schedule between hosts: bytes from and to each host, rounds and messages."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms import HostLayout, Hosts, whole_chunks
from unisono.schedule import Schedule

Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """Traffic between hosts. Bytes are multiples of N, the bytes of a rank's whole vector.

    - `sent` and `received`: the bytes of each host, in the order of the hosts' first ranks.
    - `rounds`: the number of rounds with traffic between hosts.
    - `messages`: the sum, over these rounds, of the messages that the busiest rank sends and
      receives. All chunks from one rank to another in a round are one message.
    - `host_messages`: the same sum for the busiest host.
    """

    sent: tuple[Fraction, ...]
    received: tuple[Fraction, ...]
    rounds: int
    messages: int
    host_messages: int

    @property
    def busiest(self) -> Fraction:
        """Most bytes that a host sends or receives, as a multiple of N. It limits the time on
        full-duplex links.
        """
        return max(*self.sent, *self.received)


def traffic(schedule: Schedule, hosts: Hosts) -> HostTraffic:
    """Counts the traffic of the schedule between these hosts.

    Raises `UnsupportedError` if the hosts do not match the schedule's ranks.

    >>> from unisono.algorithms import build
    >>> found = traffic(build("all_reduce", "direct", ranks=4), ((0, 1), (2, 3)))
    >>> found.sent, found.rounds
    ((Fraction(2, 1), Fraction(2, 1)), 2)
    """
    collective, columns = schedule.collective, schedule.columns
    layout = HostLayout.of(collective.ranks, hosts)
    host = np.array(layout.host_of)
    out, into = host[columns.src], host[columns.dst]
    crossing = out != into
    whole, count = whole_chunks(collective), columns.count[crossing]

    def shares(side: Numbers) -> tuple[Fraction, ...]:
        chunks = np.bincount(side[crossing], count, minlength=len(layout.hosts))
        return tuple(Fraction(int(number), whole) for number in chunks)

    rounds, src, dst = (
        column[crossing].astype(np.int64) for column in (columns.round, columns.src, columns.dst)
    )
    _, one_each = np.unique((rounds * collective.ranks + src) * collective.ranks + dst, True)
    rounds, src, dst = rounds[one_each], src[one_each], dst[one_each]
    return HostTraffic(
        sent=shares(out),
        received=shares(into),
        rounds=len(np.unique(rounds)),
        messages=_busiest(rounds, src, dst),
        host_messages=_busiest(rounds, host[src], host[dst]),
    )


def _busiest(rounds: Numbers, src: Numbers, dst: Numbers) -> int:
    """Returns a sum over all rounds: the number of messages that the round's busiest rank (or host)
    sends and receives.
    """
    total = 0
    for number in np.unique(rounds):
        at = rounds == number
        total += int(np.bincount(np.concatenate((src[at], dst[at]))).max())
    return total
