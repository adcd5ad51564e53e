"""The bytes that each rank sends to each rank in a collective. Tests compare counters with them.

Each function returns a matrix with the number of elements from rank s to rank d in row s and column
d.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.int64]


def shares(count: int, ranks: int) -> list[int]:
    """Returns the number of elements of each rank's share of `count`. If `count` is not divisible
    by `ranks`, the first ranks have one element more.
    """
    return [len(range(rank, count, ranks)) for rank in range(ranks)]


def traffic(op: str, counts: Sequence[int], ranks: int, root: int = -1) -> Matrix:
    """Returns the matrix of an operation. `counts` has the same meaning as in `elements_moved`."""
    each = np.zeros((ranks, ranks), np.int64)
    match op:
        case "all_reduce":
            parts = shares(counts[0], ranks)
            return traffic("reduce_scatter", parts, ranks) + traffic("all_gather", parts, ranks)
        case "reduce_scatter":
            each += np.array(counts)[None, :]
        case "all_gather":
            each += np.array(counts)[:, None]
        case "all_to_all" if len(counts) == ranks:
            each += np.array(counts)[None, :]
        case "all_to_all":
            each += np.reshape(counts, (ranks, ranks))
        case "broadcast":
            each[root, :] = counts[0]
        case "reduce":
            each[:, root] = counts[0]
        case "scatter":
            each[root, :] = counts
        case "gather":
            each[:, root] = counts
        case "scan" | "exscan":
            each[range(ranks - 1), range(1, ranks)] = counts[0]
    np.fill_diagonal(each, 0)
    return each


def sent_and_received(matrix: Matrix, rank: int) -> tuple[int, int]:
    """Returns the numbers of elements that a rank sends and receives."""
    return int(matrix[rank].sum()), int(matrix[:, rank].sum())
