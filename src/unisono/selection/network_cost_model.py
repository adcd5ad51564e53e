"""Two-level cost model: the time of an algorithm on several hosts.

The first term is the time inside a host (`one_host_cost_model`), without the rounds between hosts.
Each round between hosts adds a latency. Each message of the busiest rank, and each message of the
busiest host, adds its cost. The bytes of the busiest host add their time on its link. `traffic`
counts the bytes and messages in the schedule, so the counts are correct for any layout. Source: the
model of Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize collective
operation performance" (2000).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from unisono.algorithms import HostLayout, Hosts, build, measure
from unisono.errors import UnsupportedError
from unisono.selection.host_traffic import traffic
from unisono.selection.one_host_cost_model import (
    REFERENCE,
    Constants,
    CostLine,
    Fastest,
    envelope,
    predict,
    weigh,
)
from unisono.types import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConstants:
    """Seconds that each part of the communication between hosts takes. The defaults are for TCP on
    1 Gbit/s.

    - `latency_s`: each round between hosts.
    - `message_s`: each message that a rank sends or receives in such a round.
    - `host_message_s`: each message that a host sends or receives in such a round.
    - `byte_s`: each byte that a host sends or receives. Both directions run at the same time.
    - `uneven`: the fraction of the link that each additional connection leaves idle at the end,
      because connections do not share a link equally.
    """

    latency_s: float = 30e-6
    message_s: float = 5e-6
    host_message_s: float = 1e-6
    byte_s: float = 1 / 117e6
    uneven: float = 0.06


GIGABIT = NetworkConstants()

_CANDIDATES: dict[Op, tuple[str, ...]] = {
    Op.ALL_REDUCE: ("leaders", "by_host", "by_host:one_shot", "by_host:ring", "rank_order"),
    Op.REDUCE_SCATTER: ("by_host", "leaders", "by_host:ring"),
    Op.ALL_GATHER: ("by_host", "leaders", "by_host:ring"),
    Op.ALL_TO_ALL: ("direct", "by_host", "leaders"),
    Op.BROADCAST: ("leaders", "by_host"),
    Op.REDUCE: ("leaders", "by_host"),
    Op.GATHER: ("direct", "leaders"),
    Op.SCATTER: ("direct", "leaders"),
    Op.BARRIER: ("direct",),
    Op.SCAN: ("by_host", "direct", "chain"),
    Op.EXSCAN: ("by_host", "direct", "chain"),
}
"""Candidates for groups on several hosts. Of equally fast candidates, the first is chosen."""

_IN_RANK_ORDER: dict[Op, tuple[str, ...]] = {
    Op.ALL_REDUCE: ("one_shot", "rank_order"),
    Op.REDUCE: ("direct", "reduce_scatter_gather"),
    Op.REDUCE_SCATTER: ("direct",),
    Op.SCAN: ("direct", "chain"),
    Op.EXSCAN: ("direct", "chain"),
}
"""Candidates that reduce in rank order, for operations whose usual candidates do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """Requirements of a call on its algorithm.

    - `in_rank_order`: the algorithm must reduce in rank order.
    - `widening`: the factor by which elements grow if the algorithm reduces in more than one round,
      because it then sends narrow floats as float32.
    """

    in_rank_order: bool = False
    widening: int = 1


ANYTHING = Demands()


def candidates(op: Op, demands: Demands = ANYTHING) -> tuple[str, ...]:
    """Returns the candidate algorithms for groups on several hosts.

    >>> candidates(Op.BROADCAST)
    ('leaders', 'by_host')
    """
    return (_IN_RANK_ORDER if demands.in_rank_order else {}).get(op, _CANDIDATES[op])


@cache
def line_between(
    op: Op,
    algorithm: str,
    *,
    hosts: Hosts,
    cores: int,
    constants: Constants = REFERENCE,
    network: NetworkConstants = GIGABIT,
    demands: Demands = ANYTHING,
) -> CostLine:
    """Returns the time of an algorithm on these hosts as a function of the bytes.

    `cores` is the number of cores of each host. Raises `UnsupportedError` as `build` does.
    """
    layout = HostLayout.of(sum(map(len, hosts)), hosts)
    schedule = build(op, algorithm, ranks=layout.ranks, hosts=hosts)
    crossing, total = traffic(schedule, hosts), measure(schedule)
    most = max(layout.sizes)
    inside = weigh(
        rounds=total.rounds - crossing.rounds,
        written=min(total.bytes_sent, Fraction(total.rounds)),
        reduced=total.reductions,
        ranks=most,
        cores=cores,
    ).line(constants)
    at_once = crossing.messages / (2 * crossing.rounds) if crossing.rounds else 1
    sharing = 1 + network.uneven * max(0, at_once - 1)
    columns = schedule.columns
    nested = len(set(columns.round[columns.reduce].tolist())) > 1
    return CostLine(
        inside.fixed_s
        + crossing.rounds * network.latency_s
        + crossing.messages * network.message_s
        + crossing.host_messages * network.host_message_s,
        (inside.byte_s + float(crossing.busiest) * network.byte_s * sharing)
        * (demands.widening if nested else 1),
    )


@cache
def fastest_between(
    op: Op,
    *,
    hosts: Hosts,
    cores: int,
    constants: Constants = REFERENCE,
    network: NetworkConstants = GIGABIT,
    demands: Demands = ANYTHING,
) -> tuple[Fastest, ...]:
    """Returns the algorithm with the shortest predicted time on these hosts for each range of
    sizes.

    >>> four = ((0,), (1,), (2,), (3,))
    >>> [part.algorithm for part in fastest_between(Op.ALL_REDUCE, hosts=four, cores=2)]
    ['leaders', 'by_host', 'by_host:ring']
    """
    lines = {}
    for name in candidates(op, demands):
        try:
            lines[name] = line_between(
                op,
                name,
                hosts=hosts,
                cores=cores,
                constants=constants,
                network=network,
                demands=demands,
            )
        except UnsupportedError:
            continue
    return envelope(lines)


def predict_on(op: Op | str, algorithm: str, nbytes: int, *, hosts: Hosts, cores: int) -> float:
    """Returns the predicted seconds for a call on one or several hosts.

    Raises `UnsupportedError` as `build` does.

    >>> hosts, sizes = ((0, 1), (2, 3)), (8, 1 << 20)
    >>> short_s, long_s = (
    ...     predict_on("all_reduce", "by_host", nbytes, hosts=hosts, cores=2) for nbytes in sizes
    ... )
    >>> short_s < long_s
    True
    """
    if len(hosts) == 1:
        return predict(op, algorithm, len(hosts[0]), nbytes, cores=cores)
    return line_between(Op(op), algorithm, hosts=hosts, cores=cores).at(nbytes)
