"""V-collectives: collectives whose pieces differ in length from rank to rank.

Lengths are counted in rows of the leading dimension; the rows of a one-dimensional array are its
elements. Counts that all ranks know are part of the fingerprint that the ranks compare anyway, so
no extra exchange is needed. Otherwise the ranks exchange the counts within the same call.

Functions with a `self` are methods of `Communicator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.communicator.arrays import Array
from unisono.communicator.python_reductions import AnyReduction
from unisono.communicator.row_counts import Counts, RowBuffer
from unisono.communicator.v_collective_calls import (
    all_to_all_rows,
    gathering_rows,
    reduce_scattering_rows,
    scattering_rows,
)
from unisono.schedule import Schedule
from unisono.types import Op

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator


def all_gather_v(
    self: Communicator,
    x: Array,
    counts: Counts | None = None,
    out: Array | Sequence[Array] | None = None,
    *,
    pieces: bool = False,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Gathers `x` of all ranks on all ranks; the number of rows may differ from rank to rank.

    `counts` has the number of rows of each rank. Either all ranks give `counts`, or no rank does.
    Without `counts` the ranks first exchange their numbers of rows. `out` has exactly these rows,
    or is a list of one array per rank; None allocates `out`. Returns `out`, the rows in rank order;
    with `pieces=True`, a list with one view of `out` per rank. A rank without data gives an array
    of no rows.

    >>> import numpy as np, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of all_gather_v") as comm:
    ...     comm.all_gather_v(np.arange(3), pieces=True)
    [array([0, 1, 2])]
    """
    return self._engine.collective(
        "all_gather_v",
        async_op,
        gathering_rows,
        Op.ALL_GATHER,
        x,
        counts,
        -1,
        RowBuffer(out, pieces),
        algorithm,
    )


def gather_v(
    self: Communicator,
    x: Array,
    counts: Counts | None = None,
    root: int = 0,
    out: Array | Sequence[Array] | None = None,
    *,
    pieces: bool = False,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Gathers like `all_gather_v`, but on `root` only. Other ranks ignore `out` and return None."""
    return self._engine.collective(
        "gather_v",
        async_op,
        gathering_rows,
        Op.GATHER,
        x,
        counts,
        root,
        RowBuffer(out, pieces),
        algorithm,
    )


def scatter_v(
    self: Communicator,
    x: Array | Sequence[Array] | None,
    counts: Counts | None = None,
    root: int = 0,
    out: Array | None = None,
    *,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Sends the first `counts[0]` rows of `x` of `root` to rank 0, the next `counts[1]` to rank 1,
    etc.

    `x` is one array or a list of one array per rank. On other ranks `x` is None and `out` is
    required. `counts` has the number of rows of each rank. Either all ranks give `counts`, or no
    rank does. Without `counts`, a rank's `out` and its array in the root's list determine the
    number, and must agree. Returns `out`.
    """
    return self._engine.collective(
        "scatter_v", async_op, scattering_rows, x, counts, root, out, algorithm
    )


def reduce_scatter_v(
    self: Communicator,
    x: Array,
    counts: Counts,
    out: Array | None = None,
    op: AnyReduction = "sum",
    *,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces `x` over all ranks. The rows of the result are split among the ranks in rank order;
    rank r gets `counts[r]` rows.

    `counts` must be equal on all ranks and add up to the rows of `x`. Returns `out`; None allocates
    `out`.
    """
    return self._engine.collective(
        "reduce_scatter_v", async_op, reduce_scattering_rows, x, counts, out, op, algorithm
    )


def all_to_all_v(
    self: Communicator,
    x: Array,
    send_counts: Counts | Sequence[Counts],
    recv_counts: Counts | None = None,
    out: Array | Sequence[Array] | None = None,
    *,
    pieces: bool = False,
    algorithm: str | Schedule | None = None,
    async_op: bool = False,
) -> Any:
    """Sends the first `send_counts[0]` rows of `x` to rank 0, the next `send_counts[1]` to rank 1,
    etc.

    The ranks first exchange their counts. If a rank gives `recv_counts` that do not agree, all
    ranks raise `MismatchError`. No exchange is needed if `send_counts` is a table, equal on all
    ranks, whose row s has the counts of rank s. `out` has exactly the arriving rows, or is a list
    of one array per rank; None allocates `out`. Returns `out`, the rows in rank order; with
    `pieces=True`, a list with one view of `out` per rank.
    """
    return self._engine.collective(
        "all_to_all_v",
        async_op,
        all_to_all_rows,
        x,
        send_counts,
        recv_counts,
        RowBuffer(out, pieces),
        algorithm,
    )
