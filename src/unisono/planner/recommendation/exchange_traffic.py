"""The bytes of the exchanges of divided embedding tables, from closed forms, without torch.

With n ranks, B samples on a rank, F pieces of tables on each other rank, L ids in a bag, D columns
and s bytes per element, a rank sends to each other rank 16 bytes of sizes, B F bytes of lengths and
8 bytes per id. For each piece that a rank holds, it sends B D s bytes of sums to every other rank,
and receives the gradients of the sums. For tables divided by rows, the ranks add sums instead: by a
reduce_scatter forward and an all_gather backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.planner.recommendation.table_placement import TablePiece, TablePlacement

SIZES_BYTES = 16
"""Bytes of the number of samples and the number of ids that a rank sends to another rank."""
LENGTH_BYTES = 1
"""Bytes of the length of a bag."""
ID_BYTES = 8


def pass_bytes(
    placement: TablePlacement,
    rank: int,
    *,
    samples: Sequence[float],
    ids: Callable[[TablePiece], float],
    item_bytes: int,
) -> float:
    """Returns the bytes that a rank sends in the forward and backward pass of one microbatch.

    `samples`: number of samples of each rank. `ids`: function that returns the number of this
    rank's ids that belong to a piece.

    >>> from unisono.planner.recommendation import PlacedTable, TableShape
    >>> one = PlacedTable(shape=TableShape(rows=9, ids=2), kind="table", ranks=(1,))
    >>> placement = TablePlacement(tables=(one,), width=4, ranks=2)
    >>> sizes = dict(samples=(3, 3), ids=lambda piece: 6, item_bytes=4)
    >>> pass_bytes(placement, 0, **sizes) == 16 + 3 + 6 * 8 + 3 * 4 * 4  # ids, then gradients
    True
    >>> pass_bytes(placement, 1, **sizes) == 16 + 3 * 4 * 4  # sums
    True
    """
    if not placement.is_divided:
        return 0.0
    own, held = placement.pieces(rank), [placement.pieces(r) for r in range(placement.ranks)]
    elsewhere = [p for other, pieces in enumerate(held) if other != rank for p in pieces]
    others, here = placement.ranks - 1, samples[rank]
    elements = 2 * others * max(samples) * _columns(own, are_summed=True)
    elements += (sum(samples) - here) * _columns(own, are_summed=False)
    elements += here * _columns(elsewhere, are_summed=False)
    sent = SIZES_BYTES * others + LENGTH_BYTES * here * len(elsewhere)
    return sent + ID_BYTES * sum(ids(piece) for piece in elsewhere) + elements * item_bytes


def _columns(pieces: Sequence[TablePiece], *, are_summed: bool) -> int:
    return sum(piece.sizes[1] for piece in pieces if piece.is_summed == are_summed)


def all_bytes(placement: TablePlacement, *, samples: float, item_bytes: int) -> float:
    """Returns the bytes that all ranks send for the tables in a step, without the messages of
    sizes: also the sum of the gradients of replicated tables, 2 (n-1)/n of their bytes on each.

    `samples`: number of samples of a step on all ranks together. A rank's load contains the
    messages that it sends and receives for its own pieces only, so the sum of all loads counts each
    message once. Assumes full bags, and ids that are spread evenly over the rows.
    """
    loads = rank_loads(placement, samples=samples, item_bytes=item_bytes)
    replicas = placement.replicated_rows * placement.width * item_bytes
    share = 2 * (placement.ranks - 1) / placement.ranks
    return sum(loads) + placement.ranks * (share * replicas)


def piece_load(
    placement: TablePlacement, piece: TablePiece, *, samples: float, item_bytes: int
) -> float:
    """Returns the bytes that the rank of a piece sends and receives for the piece in a step.

    The rank receives lengths, ids and gradients, and sends sums.
    """
    ranks = placement.ranks
    ids = placement.tables[piece.table].shape.ids / (ranks if piece.is_summed else 1)
    of_sample = LENGTH_BYTES + ID_BYTES * ids + 2 * piece.sizes[1] * item_bytes
    return samples * (ranks - 1) / ranks * of_sample


def rank_loads(placement: TablePlacement, *, samples: float, item_bytes: int) -> tuple[float, ...]:
    """Returns, for each rank, the sum of `piece_load` over its pieces; replicated tables add 0."""
    return tuple(
        sum(
            piece_load(placement, piece, samples=samples, item_bytes=item_bytes)
            for piece in placement.pieces(rank)
        )
        for rank in range(placement.ranks)
    )
