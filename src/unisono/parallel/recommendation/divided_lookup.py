"""The lookup of bags in tables that are split across several ranks.

Naumov et al., "Deep learning recommendation model for personalization and recommendation systems",
2019, section 3 (table-wise); Mudigere et al., "Software-hardware co-design for fast and scalable
training of deep learning recommendation models", 2022, section 4.2 (row- and column-wise).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import distributed as dist
from torch.nn import functional

from unisono.parallel.divisible.exchanges import sum_to_parts
from unisono.parallel.layers import move_rows
from unisono.parallel.recommendation.bag_exchange import (
    ArrivedBags,
    Bags,
    exchange_bags,
    sum_bags,
)
from unisono.planner.recommendation import TablePiece, TablePlacement


class DividedLookup:
    """Sums the vectors of each bag, also from tables on other ranks. Collective."""

    def __init__(self, placement: TablePlacement, group: dist.ProcessGroup) -> None:
        self._placement, self._group = placement, group
        self._rank = dist.get_rank(group)
        self._pieces = [placement.pieces(rank) for rank in range(placement.ranks)]

    def __call__(self, weights: Sequence[torch.Tensor], bags: Sequence[Bags]) -> list[torch.Tensor]:
        """Returns the sums (samples, width) of each table for this rank's samples.

        `weights`: this rank's part of each table, (rows, columns), which may be empty.
        """
        found = {
            number: sum_bags(weights[number], bags[number])
            for number, table in enumerate(self._placement.tables)
            if table.kind == "replicated"
        }
        if self._placement.is_divided:
            outgoing = [[piece_bags(piece, bags) for piece in pieces] for pieces in self._pieces]
            arrived = exchange_bags(outgoing, len(bags[0].lengths), self._group)
            found |= self._exchanged(weights, arrived)
        return [found[number] for number in range(len(found))]

    def _exchanged(
        self, weights: Sequence[torch.Tensor], arrived: ArrivedBags
    ) -> dict[int, torch.Tensor]:
        own = self._pieces[self._rank]
        sums = {
            piece.table: sum_bags(weights[piece.table], bags)
            for piece, bags in zip(own, arrived.bags, strict=True)
        }
        # A rank without tables sends nothing, but its backward pass must take part in the exchange.
        nothing = weights[0].new_zeros(sum(arrived.samples), 0) + weights[0].sum() * 0
        whole = [sums[piece.table] for piece in own if not piece.is_summed]
        returned = self._returned(torch.cat([nothing, *whole], dim=1), arrived.samples)
        summed = [piece for piece in own if piece.is_summed]
        if summed:
            partial = torch.cat([sums[piece.table] for piece in summed], dim=1)
            returned |= self._summed(partial, summed, arrived.samples)
        return returned

    def _returned(self, sums: torch.Tensor, samples: Sequence[int]) -> dict[int, torch.Tensor]:
        """Sends each rank the sums of its samples; `sums`: (samples of all ranks, own columns)."""
        held = [[piece for piece in pieces if not piece.is_summed] for pieces in self._pieces]
        widths = [sum(piece.sizes[1] for piece in pieces) for pieces in held]
        if not any(widths):
            return {}
        here = samples[self._rank]
        sent = [count * widths[self._rank] for count in samples]
        arriving = [here * width for width in widths]
        moved = move_rows(sums.flatten(), self._group, sent, arriving)
        columns: dict[int, dict[int, torch.Tensor]] = {}
        for part, pieces, width in zip(torch.split(moved, arriving), held, widths, strict=True):
            cuts = torch.split(part.view(here, width), [p.sizes[1] for p in pieces], dim=1)
            for piece, cut in zip(pieces, cuts, strict=True):
                columns.setdefault(piece.table, {})[piece.start[1]] = cut
        return {number: _in_order(parts) for number, parts in columns.items()}

    def _summed(
        self, partial: torch.Tensor, pieces: Sequence[TablePiece], samples: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        """Sums the partial sums of row-divided tables over the ranks, for this rank's samples."""
        longest = max(samples)
        padded = [
            functional.pad(part, (0, 0, 0, longest - len(part)))
            for part in torch.split(partial, list(samples))
        ]
        own = sum_to_parts(torch.cat(padded), self._group, dim=0)[: samples[self._rank]]
        cuts = torch.split(own, [piece.sizes[1] for piece in pieces], dim=1)
        return {piece.table: cut for piece, cut in zip(pieces, cuts, strict=True)}


def piece_bags(piece: TablePiece, bags: Sequence[Bags]) -> Bags:
    """Returns the bags of a piece's table, with only those ids whose rows are in the piece."""
    whole = bags[piece.table]
    return whole.of_rows(piece.start[0], piece.sizes[0]) if piece.is_summed else whole


def _in_order(parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Returns the column parts of a table, joined in the order of their first columns."""
    return torch.cat([parts[first] for first in sorted(parts)], dim=1)
