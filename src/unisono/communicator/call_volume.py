"""Bytes that a call moves, computed by a formula for each operation.

The counters of a communicator add these bytes for each call. They depend on the operation, the
lengths and the rank only, so every algorithm counts the same. A rank moves these bytes if each
element goes straight to the rank that needs it. Without a root and with equal shares, this is the
least that a rank can send (Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication:
theory, practice, and experience", 2007, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from unisono import native
from unisono.execution import OP_CODES
from unisono.types import Op

if TYPE_CHECKING:
    from unisono.communicator.call_cache import CallRequest

_INTERNAL = len(OP_CODES)

COUNTER_ROWS = (
    *(str(op) for op in OP_CODES),
    *("internal", "send", "recv", "put", "get", "signal", "wait"),
)
"""The rows of `native.Group.counters`, as in `csrc/core/operation_counters.h`."""


class CallVolume(NamedTuple):
    """Amounts that a call adds to one row of a rank's counters."""

    row: int
    calls: int
    bytes_sent: int
    bytes_received: int


def elements_moved(
    op: Op, counts: Sequence[int], *, rank: int, ranks: int, root: int = -1
) -> tuple[int, int]:
    """Returns the numbers of elements that a rank sends to others and receives from others.

    `counts` are the elements of each piece. An operation in place has one piece. An operation whose
    larger buffer is split among the ranks has one piece per rank. An all_to_all has one count per
    rank, or one count from each rank to each rank. See `CommunicatorStats` for the formulas.

    >>> elements_moved(Op.ALL_REDUCE, [12], rank=0, ranks=4)  # 2 (n-1)/n N
    (18, 18)
    >>> elements_moved(Op.REDUCE_SCATTER, [5, 4, 3], rank=0, ranks=3)
    (7, 10)
    >>> elements_moved(Op.BROADCAST, [12], rank=0, ranks=4, root=0)
    (36, 0)
    """
    others = ranks - 1
    if op is Op.BARRIER:
        return 0, 0
    if op is Op.ALL_REDUCE:
        share = counts[0] // ranks + (rank < counts[0] % ranks)
        moved = counts[0] - share + others * share  # a reduce_scatter, then an all_gather
        return moved, moved
    if op is Op.ALL_TO_ALL:
        return _exchanged(counts, rank, ranks)
    if op.scans:  # each rank but the last sends to the next rank
        return counts[0] * (rank < others), counts[0] * (rank > 0)
    own, total = counts[rank if len(counts) > 1 else 0], sum(counts)
    if op is Op.REDUCE_SCATTER:
        return total - own, others * own
    if op is Op.ALL_GATHER:
        return others * own, total - own
    at_root, elsewhere = {
        Op.BROADCAST: ((others * own, 0), (0, own)),
        Op.REDUCE: ((0, others * own), (own, 0)),
        Op.SCATTER: ((total - own, 0), (0, own)),
        Op.GATHER: ((0, total - own), (own, 0)),
    }[op]
    return at_root if rank == root else elsewhere


def _exchanged(counts: Sequence[int], rank: int, ranks: int) -> tuple[int, int]:
    """Returns the elements that a rank sends to and receives from other ranks in an all_to_all."""
    if len(counts) == ranks:
        moved = sum(counts) - counts[rank]
        return moved, moved
    own = counts[rank * ranks + rank]
    return sum(counts[rank * ranks : (rank + 1) * ranks]) - own, sum(counts[rank::ranks]) - own


def volume_of(request: CallRequest, *, rank: int, ranks: int) -> CallVolume:
    """Returns the volume of a call in the caller's elements. Packed arrays count as one call
    each.
    """
    size_bytes = request.dtype.size_bytes
    pieces: list[tuple[int, ...]] = [(length,) for length in request.packed]
    pieces = pieces or [request.lengths]
    moved = [
        elements_moved(
            request.op,
            [length // size_bytes for length in lengths],
            rank=rank,
            ranks=ranks,
            root=request.root,
        )
        for lengths in pieces
    ]
    own_bytes = (request.caller_dtype or request.dtype).size_bytes
    return CallVolume(
        row=OP_CODES[request.op],
        calls=len(pieces),
        bytes_sent=sum(sent for sent, _ in moved) * own_bytes,
        bytes_received=sum(received for _, received in moved) * own_bytes,
    )


def internal_volume(nbytes: int, *, ranks: int) -> CallVolume:
    """Returns the volume of an all_gather of `nbytes` per rank that the library makes for itself.

    >>> internal_volume(8, ranks=3)
    CallVolume(row=11, calls=1, bytes_sent=16, bytes_received=16)
    """
    moved = nbytes * (ranks - 1)
    return CallVolume(row=_INTERNAL, calls=1, bytes_sent=moved, bytes_received=moved)


def made_internal(call: native.Prepared) -> native.Prepared:
    """Returns the same call, but the counters record it as a call that the library makes for
    itself.
    """
    _, _, sent, received = call.volume
    volume = CallVolume(row=_INTERNAL, calls=1, bytes_sent=sent, bytes_received=received)
    return call.with_volume(volume)
