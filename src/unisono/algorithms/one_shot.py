"""One-shot all-reduce: all ranks exchange their whole vectors in one round, for short messages."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from unisono.algorithms.cost import Cost
from unisono.algorithms.registry import algorithm
from unisono.schedule import Builder, Collective, Schedule
from unisono.types import Op


def _cost(ranks: int) -> Cost:
    return Cost(rounds=1, bytes_sent=Fraction(ranks - 1), reductions=Fraction(ranks - 1))


@algorithm(Op.ALL_REDUCE, "one_shot", cost=_cost)
def all_reduce(ranks: int) -> Schedule:
    """Every rank reads all vectors and reduces them in rank order.

    Rounds: 1. Bytes: (n-1) x N (in shared memory, each rank writes N only once). Reductions: (n-1)
    x N. Source: the one-shot all-reduce of NVIDIA TensorRT-LLM and of MSCCL++ ("all pairs, LL").
    """
    b = Builder(Collective(op=Op.ALL_REDUCE, ranks=ranks), "one_shot")
    dst, src = np.nonzero(~np.eye(ranks, dtype=bool))
    b.reduce(src, 0, dst)
    return b.build()
