"""Bags of ids, and the exchange that sends ids to the ranks that hold their rows.

Each rank sends to every other rank first the numbers of samples and ids, then the lengths of the
bags as bytes, then the ids. Messages have no padding, and a rank receives only ids of rows that it
holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.nn import functional

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
