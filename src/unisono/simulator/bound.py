"""What no algorithm can beat on a network: bytes that must leave, arrive, or cross the middle."""

from __future__ import annotations

import numpy as np

from unisono.topology import Floats, Ints, Topology, middle
from unisono.types import Op

# What each operation cannot do without, in N, of n ranks: sent by all ranks together, sent and
# received by the rank that has the most to do, across the middle one way.
# Every element of a reduction is sent n-1 times on the way to its sum, wherever that is made.


def bound_s(op: Op | str, topology: Topology, nbytes: float, *, in_network: bool = False) -> float:
    """Seconds below which no schedule of all ranks of the network can be, by its bandwidths alone.

    The most of: the bytes that all ranks must send over what all their links take; what one rank
    must send, or receive, over its links; what must cross the middle over the bisection. With
    `in_network`, switches may add and copy, so only the last three hold.

    >>> from unisono import topology
    >>> bound_s("all_reduce", topology.ring(4), 100e6)
    0.0015
    """
    op, n = Op(op), topology.num_ranks
    if n < 2 or op is Op.BARRIER:
        return 0.0
    out, into = (_rates(topology, ends) for ends in (topology.links.src, topology.links.dst))
    rate_Bps, low = middle(topology)
    total, sent, received, across = _needs(op, n, low)
    root_only = (op in (Op.BROADCAST, Op.SCATTER), op in (Op.REDUCE, Op.GATHER))
    send_rate = float(out[0] if root_only[0] else out.min())
    receive_rate = float(into[0] if root_only[1] else into.min())
    times = [
        0.0 if in_network else total / float(out.sum()),
        sent / send_rate,
        received / receive_rate,
        across / rate_Bps,
    ]
    return nbytes * max(times)


def _rates(topology: Topology, ends: Ints) -> Floats:
    """What the links at each rank take together."""
    n, rate = topology.num_ranks, topology.links.bandwidth_Bps
    return np.bincount(ends, rate, minlength=topology.num_nodes)[:n].astype(np.float64)


def _needs(op: Op, n: int, low: int) -> tuple[float, float, float, float]:
    """`low` of the ranks are on the side from which the middle is crossed."""
    others, fewer = (n - 1) / n, min(low, n - low) / n
    return {
        Op.ALL_REDUCE: (2.0 * (n - 1), 1.0, 1.0, 1.0),
        Op.REDUCE_SCATTER: (n - 1.0, others, 1 / n, (n - low) / n),
        Op.ALL_GATHER: (n - 1.0, 1 / n, others, low / n),
        Op.ALL_TO_ALL: (n - 1.0, others, others, low * (n - low) / n),
        Op.BROADCAST: (n - 1.0, 1.0, 1.0, 1.0),
        Op.REDUCE: (n - 1.0, 1.0, 1.0, 1.0),
        Op.GATHER: (others, 1 / n, others, fewer),
        Op.SCATTER: (others, others, 1 / n, fewer),
        Op.SCAN: (n - 1.0, 0.0, 1 / n, 0.5),
        Op.EXSCAN: (n - 1.0, 0.0, 1 / n, 0.5),
    }[op]
