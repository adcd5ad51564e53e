"""Runs `unisono explain`: starts ranks, which explain their choice of algorithm."""

from __future__ import annotations

import unisono
from unisono import algorithms
from unisono.communicator import Explanation


def explain_choice(op: str, nbytes: int, ranks: int) -> Explanation:
    """Returns rank 0's explanation of the chosen algorithm, with times that all ranks measure now.
    Raises `UnsupportedError` for an unknown operation."""
    algorithms.names(op)  # raises an error for an unknown operation before a process starts
    answers: list[Explanation] = unisono.run(_explain_rank, ranks=ranks, args=(op, nbytes))
    return answers[0]


def _explain_rank(op: str, nbytes: int) -> Explanation:
    with unisono.init() as comm:
        return comm.explain(op, nbytes, measure=True)
