"""Lower bounds of a collective's time on a network, from the bytes that must cross its links."""

from __future__ import annotations

import numpy as np

from unisono.topology import Floats, Ints, Topology, middle
from unisono.types import Op

# Four amounts of data that an operation on n ranks must move, in multiples of N: the total that all
# ranks send, the most that one rank sends, the most that one rank receives, and the amount that
# crosses the bisection in one direction. Each element of a reduction is sent n-1 times, wherever
# the sum is computed.


def bound_s(op: Op | str, topology: Topology, nbytes: float, *, in_network: bool = False) -> float:
    """Returns a lower bound in seconds of any schedule on all ranks. Latencies are ignored.

    The bound is the maximum of three times. The first is the number of bytes that all ranks must
    send, divided by the bandwidth of all their links. The second is the number of bytes that one
    rank must send or receive, divided by the bandwidth of its links. The third is the number of
    bytes that must cross the bisection, divided by its bandwidth. With `in_network`, switches may
    reduce and copy, so the first time does not count.

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
    """Returns the total bandwidth of the links at each rank."""
    n, rate = topology.num_ranks, topology.links.bandwidth_Bps
    return np.bincount(ends, rate, minlength=topology.num_nodes)[:n].astype(np.float64)


def _needs(op: Op, n: int, low: int) -> tuple[float, float, float, float]:
    """Returns four amounts in multiples of N: the total that is sent, the most that one rank sends,
    the most that one rank receives, and the amount that crosses the bisection. These data cross
    from the half with `low` ranks to the other half."""
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
