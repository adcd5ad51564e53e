"""The bytes that ranks send for embedding tables: the oracle of placements and predictions."""

from __future__ import annotations

from unisono.planner.recommendation import TablePiece, TablePlacement, pass_bytes


def step_bytes(placement: TablePlacement, *, samples: float, item_bytes: int) -> tuple[float, ...]:
    """Returns the bytes that each rank sends for the tables in a step of `samples` samples on all
    ranks together, with full bags, whose ids are spread evenly over the rows.
    """
    ranks = placement.ranks
    share = samples / ranks
    replicas = placement.replicated_rows * placement.width * item_bytes

    def ids(piece: TablePiece) -> float:
        return share * placement.tables[piece.table].shape.ids / (ranks if piece.is_summed else 1)

    return tuple(
        2 * (ranks - 1) / ranks * replicas
        + pass_bytes(placement, rank, samples=[share] * ranks, ids=ids, item_bytes=item_bytes)
        for rank in range(ranks)
    )
