"""All-to-all for several hosts with any numbers of ranks. Any two hosts exchange all their data
through one rank of each host.

n is the number of ranks, H the number of hosts. L_h is the number of ranks of host h, L the largest
L_h. N is the size of the whole vector in bytes. "Bytes" is an upper bound for the busiest rank.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from unisono.algorithms.cost import Cost
from unisono.algorithms.host_layout import HostLayout, Hosts
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _all_to_all_cost(ranks: int, *, hosts: Hosts | None = None) -> Cost:
    layout = HostLayout.of(ranks, hosts)
    others, most = len(layout.hosts) - 1, max(layout.sizes)
    # A rank sends its own pieces. The representative for a pair of hosts also forwards the pieces
    # of its host to the other host, and distributes the pieces that arrive from the other host.
    represented = max(-(-others // size) * size for size in layout.sizes) * most
    inside = layout.shared * (2 if others else 1)
    return Cost(rounds=min(others, 1) + inside, bytes_sent=1 + Fraction(2 * represented, ranks))


@algorithm(Op.ALL_TO_ALL, "by_host", cost=_all_to_all_cost, exact=False)
def all_to_all(ranks: int, *, hosts: Hosts | None = None) -> Schedule:
    """Sends all pieces from one host to another host in one message, from one rank to one rank. A
    host assigns the other hosts to its ranks in turn. All pieces must have the same length.

    Rounds: 1 between hosts, and 2 inside. Bytes: about N for the rank's own pieces, plus twice the
    pieces that the rank forwards for its host; per host L_h(n - L_h)/n x N, the minimum. Source:
    Jackson and Booth, "Planned AlltoAllv: a clustered approach" (2004), with several
    representatives.
    """
    layout = HostLayout.of(ranks, hosts)
    b = Builder(Collective(op=Op.ALL_TO_ALL, ranks=ranks), "by_host")
    count = len(layout.hosts)
    bundles = []  # (sender, receiver, sources, destinations) for each pair of hosts
    for here, there in ((h, g) for h in range(count) for g in range(count)):
        src = np.repeat(layout.hosts[here], len(layout.hosts[there]))
        dst = np.tile(layout.hosts[there], len(layout.hosts[here]))
        if here == there:
            src, dst = src[src != dst], dst[src != dst]
            b.copy(src, src * ranks + dst, dst)
        else:
            bundles.append(
                (
                    _representative(layout, here, there),
                    _representative(layout, there, here),
                    src,
                    dst,
                )
            )
    for mine, _, src, dst in bundles:
        away = src != mine
        b.copy(src[away], (src * ranks + dst)[away], mine)
    b.round += layout.shared
    for mine, theirs, src, dst in bundles:
        b.copy(mine, src * ranks + dst, theirs)
    b.next_round()
    for _, theirs, src, dst in bundles:
        away = dst != theirs
        b.copy(theirs, (src * ranks + dst)[away], dst[away])
    return b.build()


def _representative(layout: HostLayout, here: int, there: int) -> int:
    """Returns the rank of host `here` that exchanges data with host `there`."""
    ranks = layout.hosts[here]
    return ranks[(there - (there > here)) % len(ranks)]
