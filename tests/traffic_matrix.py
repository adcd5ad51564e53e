"""The bytes from each rank to each rank in a collective: an oracle for counters.

Each function returns a matrix whose row s and column d has the elements from rank s to rank d.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.int64]


def shares(count: int, ranks: int) -> list[int]:
    """Returns the elements of each rank's share of `count`: the first ranks have one more."""
    return [len(range(rank, count, ranks)) for rank in range(ranks)]


def traffic(op: str, counts: Sequence[int], ranks: int, root: int = -1) -> Matrix:
    """Returns the matrix of an operation. `counts` as for `elements_moved`."""
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
    """Returns the elements that a rank sends and receives."""
    return int(matrix[rank].sum()), int(matrix[:, rank].sum())
