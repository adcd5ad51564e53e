"""The lookup of bags of ids in tables that are split across several ranks.

Each rank sends to every other rank first the numbers of samples and ids, then the lengths of the
bags as bytes, then the ids. Messages have no padding, and a rank receives only ids of rows that it
holds. The sums of the rows come back to the ranks of the samples.

Naumov et al., "Deep learning recommendation model for personalization and recommendation systems",
2019, section 3 (table-wise); Mudigere et al., "Software-hardware co-design for fast and scalable
training of deep learning recommendation models", 2022, section 4.2 (row- and column-wise).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.nn import functional

from unisono.parallel.divisible.exchanges import move_rows, sum_to_parts
from unisono.planner.recommendation import TablePiece, TablePlacement

NO_ID = -1
"""Value in the input for a place without an id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bags:
    """The ids of one table for several samples, with one bag per sample; a bag may be empty."""

    ids: torch.Tensor
    """Ids of all bags, bag after bag."""
    lengths: torch.Tensor
    """Number of ids in each bag."""

    @staticmethod
    def of_places(places: torch.Tensor) -> Bags:
        """Returns the bags of an array of ids, (samples, places), whose empty places are `NO_ID`.

        >>> bags = Bags.of_places(torch.tensor([[7, NO_ID], [NO_ID, NO_ID], [3, 7]]))
        >>> bags.ids.tolist(), bags.lengths.tolist()
        ([7, 3, 7], [1, 0, 2])
        """
        is_id = places != NO_ID
        return Bags(ids=places[is_id], lengths=is_id.sum(1))

    def of_rows(self, first: int, count: int) -> Bags:
        """Returns bags with only the ids of `count` rows from `first` on.

        Subtracts `first` from these ids, so that id `first` becomes 0.
        """
        is_here = (self.ids >= first) & (self.ids < first + count)
        sample = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        lengths = torch.bincount(sample[is_here], minlength=len(self.lengths))
        return Bags(ids=self.ids[is_here] - first, lengths=lengths)


def sum_bags(weight: torch.Tensor, bags: Bags) -> torch.Tensor:
    """Returns the sum of each bag's vectors, (samples, columns), which is zero for an empty bag."""
    firsts = bags.lengths.cumsum(0) - bags.lengths
    return functional.embedding_bag(bags.ids, weight, firsts, mode="sum")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivedBags:
    """The bags that this rank received: those of all ranks for this rank's pieces of tables."""

    bags: tuple[Bags, ...]
    """Bags for each piece of this rank: the samples of rank 0, then of rank 1, and so on."""
    samples: tuple[int, ...]
    """Number of samples of each rank."""


def exchange_bags(
    outgoing: Sequence[Sequence[Bags]], samples: int, group: dist.ProcessGroup
) -> ArrivedBags:
    """Sends each rank its entry of `outgoing`: the bags for that rank's table pieces. Collective.

    A rank finds the number of its own pieces in its own entry of `outgoing`.
    """
    rank = dist.get_rank(group)
    ids = [_joined([each.ids for each in bags]) for bags in outgoing]
    lengths = [_joined([each.lengths for each in bags]) for bags in outgoing]
    sizes = torch.tensor([[samples, len(each)] for each in ids])
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes, group=group)
    pieces = len(outgoing[rank])
    counts: list[int] = arriving[:, 0].tolist()
    found_lengths = _sent(
        [each.to(torch.uint8) for each in lengths], [pieces * count for count in counts], group
    )
    found_ids = _sent(ids, arriving[:, 1].tolist(), group)
    by_source = [
        _pieces(source_ids, source_lengths.long().view(pieces, count))
        for source_ids, source_lengths, count in zip(found_ids, found_lengths, counts, strict=True)
    ]
    bags = tuple(
        Bags(
            ids=torch.cat([source[piece].ids for source in by_source]),
            lengths=torch.cat([source[piece].lengths for source in by_source]),
        )
        for piece in range(pieces)
    )
    return ArrivedBags(bags=bags, samples=tuple(counts))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def _sent(
    parts: Sequence[torch.Tensor], arriving: list[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Sends `parts[i]` to rank i; returns the parts from all ranks, of lengths `arriving`."""
    whole = torch.cat(list(parts))
    found = whole.new_empty(sum(arriving))
    dist.all_to_all_single(found, whole, arriving, [len(part) for part in parts], group=group)
    return torch.split(found, arriving)


def _pieces(ids: torch.Tensor, lengths: torch.Tensor) -> list[Bags]:
    """Returns the bags of each piece, from joined ids and from lengths (pieces, samples)."""
    ends = [0, *itertools.accumulate(lengths.sum(1).tolist())]
    spans = itertools.pairwise(ends)
    return [
        Bags(ids=ids[first:end], lengths=row)
        for (first, end), row in zip(spans, lengths, strict=True)
    ]


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
