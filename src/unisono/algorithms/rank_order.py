"""Folds in the order of ranks whatever the hosts, for results whose bits do not depend on them."""

from __future__ import annotations

from unisono.algorithms import by_host, direct
from unisono.algorithms.compose import in_sequence
from unisono.algorithms.cost import Cost
from unisono.algorithms.host_layout import Hosts
from unisono.algorithms.registry import algorithm, cost
from unisono.schedule import Schedule
from unisono.types import Op


def _cost(ranks: int, *, hosts: Hosts | None = None) -> Cost:
    scatter = cost(Op.REDUCE_SCATTER, "direct", ranks=ranks)
    return scatter + cost(Op.ALL_GATHER, "by_host:direct", ranks=ranks, hosts=hosts)


@algorithm(Op.ALL_REDUCE, "rank_order", cost=_cost, exact=False)
def all_reduce(ranks: int, *, hosts: Hosts | None = None) -> Schedule:
    """Fold part i at rank i, of the contributions of all ranks themselves; then gather the parts,
    each but once on its way to a host.

    The bits are those of `direct`, with about half its bytes between hosts, and more than if each
    host reduced first: a sum that was begun elsewhere would be another one.

    Rounds: 3 (2 with a rank a host). Bytes: (n-1)/n x N and those of the all-gather; of a host of
    L_h ranks in L_h(n - L_h)/n x N + (n - L_h)/n x N. Reductions: (n-1)/n x N. Source:
    Rabenseifner, "Optimization of collective reduction operations" (2004); Träff, "Efficient
    allgather for regular SMP-clusters" (2006).
    """
    gather = by_host.all_gather(ranks, between="direct", hosts=hosts)
    return in_sequence(Op.ALL_REDUCE, [direct.reduce_scatter(ranks), gather])
