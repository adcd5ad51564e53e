"""Schedules made of schedules: backwards, one after another, side by side, on some of the ranks.

The unit of composition is a *share*: `unit` chunks that lie together. A schedule that is put into
a larger one keeps its transfers; its ranks become some ranks of the larger one, and each of its
pieces stands for a list of shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import lcm

import numpy as np

from unisono.algorithms.cost import BY_PART
from unisono.errors import UnsupportedError
from unisono.schedule import Builder, Collective, Schedule, Transfers
from unisono.types import Op

_BACKWARDS = {
    Op.ALL_GATHER: Op.REDUCE_SCATTER,
    Op.BROADCAST: Op.REDUCE,
    Op.SCATTER: Op.GATHER,
}


class Composer:
    """A builder whose building blocks are schedules.

    `unit` chunks are a share: it must be a multiple of the parts of every schedule put in.
    """

    def __init__(self, collective: Collective, unit: int) -> None:
        self.builder = Builder(collective, "composition")
        self.unit = unit

    def add(
        self,
        part: Schedule,
        ranks: Sequence[int],
        shares: Sequence[Sequence[int]],
        *,
        start: int = 0,
        channel: int = 0,
    ) -> int:
        """Put in `part` from round `start` on; returns the round after it.

        Its rank r is `ranks[r]`; its piece p (its whole vector, if it has no pieces) is the shares
        `shares[p]`, on all ranks.
        """
        parts = part.collective.parts
        assert part.scratch == 0, "our algorithms need no scratch"
        assert self.unit % parts == 0, "the unit is a multiple of the parts"
        width = self.unit // parts
        places = [
            [share * self.unit + number * width for share in piece]
            for piece in shares
            for number in range(parts)
        ]
        b = self.builder
        for t in part.transfers:
            b.round = start + t.round
            add = b.reduce if t.reduce else b.copy
            src, dst = ranks[t.src], ranks[t.dst]
            pairs = [
                pair
                for i in range(t.count)
                for pair in zip(places[t.src_chunk + i], places[t.dst_chunk + i], strict=True)
            ]
            for src_chunk, dst_chunk, count in _runs_of_pairs(pairs, width):
                add(src, src_chunk, dst, dst_chunk, count=count, channel=channel + t.channel)
        return start + part.num_rounds

    def build(self) -> Schedule:
        """The composition."""
        return self.builder.build()


def runs(chunks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Chunks as (first, count) of those that lie together.

    >>> list(runs([4, 0, 1, 5, 7]))
    [(0, 2), (4, 2), (7, 1)]
    """
    for first, _, count in _runs_of_pairs([(chunk, chunk) for chunk in chunks], 1):
        yield first, count


def backwards(schedule: Schedule) -> Schedule:
    """The opposite operation: an all-gather becomes a reduce-scatter, a broadcast a reduce, a
    scatter a gather.

    Time and every transfer are turned round. It is right if each rank receives each chunk at most
    once, which holds for everything here. Source: Chan, Heimlich, Purkayastha, van de Geijn,
    "Collective communication: theory, practice, and experience" (2007), duals.
    """
    collective = schedule.collective
    op = _BACKWARDS[collective.op]
    forwards = schedule.columns.select(slice(None, None, -1))
    columns = replace(
        forwards,
        round=schedule.num_rounds - 1 - forwards.round,
        src=forwards.dst,
        src_chunk=forwards.dst_chunk,
        dst=forwards.src,
        dst_chunk=forwards.src_chunk,
        reduce=np.full(len(forwards), op.reduces),
    )
    return Schedule(
        collective=replace(collective, op=op),
        algorithm=schedule.algorithm,
        transfers=Transfers(columns),
    )


def in_sequence(op: Op, parts: Sequence[Schedule]) -> Schedule:
    """One operation as several, one after another, on all ranks: an all-reduce as a reduce-scatter
    and an all-gather, for example. The root is that of the parts."""
    ranks = parts[0].collective.ranks
    shares = 1 if all(part.collective.op in BY_PART for part in parts) else ranks
    unit = lcm(*(part.collective.parts for part in parts))
    roots = [part.collective.root for part in parts]
    collective = Collective(
        op=op,
        ranks=ranks,
        parts=shares * unit if op in BY_PART else unit,
        root=next(root for root in roots if root is not None) if op.rooted else None,
    )
    composer = Composer(collective, unit)
    start = 0
    for part in parts:
        whole = part.collective.op in BY_PART
        pieces = [range(shares)] if whole else [[share] for share in range(shares)]
        start = composer.add(part, range(ranks), pieces, start=start)
    return composer.build()


def in_channels(
    parts: Sequence[Schedule], orders: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """The vector in equal shares, one for each of the schedules, all at the same time.

    All are of one operation. The ranks of schedule i are `orders[i]`; by default the same in all.
    """
    first = parts[0].collective
    op, ranks, count = first.op, first.ranks, len(parts)
    if op is Op.BARRIER:
        raise UnsupportedError("barrier moves nothing and has no channels")
    unit = lcm(*(part.collective.parts for part in parts))
    composer = Composer(replace(first, parts=count * unit), unit)
    channel = 0
    for i, part in enumerate(parts):
        order: Sequence[int] = range(ranks) if orders is None else orders[i]
        pieces: list[int] = [0]
        if op is Op.ALL_TO_ALL:
            pieces = [src * ranks + dst for src in order for dst in order]
        elif op not in BY_PART:
            pieces = list(order)
        shares = [[piece * count + i] for piece in pieces]
        composer.add(part, order, shares, channel=channel)
        channel += 1 + max((t.channel for t in part.transfers), default=0)
    return composer.build()


def _runs_of_pairs(pairs: Iterable[tuple[int, int]], width: int) -> Iterator[tuple[int, int, int]]:
    """(from, to) of moves of `width` chunks each, as (from, to, count) of those that join up."""
    first = to = count = 0
    for src, dst in sorted(pairs):
        if count and (src, dst) == (first + count, to + count):
            count += width
            continue
        if count:
            yield first, to, count
        first, to, count = src, dst, width
    if count:
        yield first, to, count
