"""Composition of schedules: reversal, sequences, parallel channels, and schedules on some of the
ranks.

The unit of composition is a *share*: `unit` adjacent chunks. A schedule inside a larger schedule
keeps its transfers. Its ranks become ranks of the larger schedule. Each of its pieces becomes a
list of shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import lcm

import numpy as np
from numpy.typing import ArrayLike

from unisono.algorithms.cost import BY_PART
from unisono.errors import UnsupportedError
from unisono.schedule import Builder, Collective, Columns, Numbers, Schedule, Transfers
from unisono.types import Op

_BACKWARDS = {
    Op.ALL_GATHER: Op.REDUCE_SCATTER,
    Op.BROADCAST: Op.REDUCE,
    Op.SCATTER: Op.GATHER,
}


class Composer:
    """A builder that combines schedules.

    A share has `unit` chunks. `unit` must be a multiple of the parts of every added schedule.
    """

    def __init__(self, collective: Collective, unit: int) -> None:
        self.builder = Builder(collective, "composition")
        self.unit = unit

    def add(
        self,
        part: Schedule,
        ranks: ArrayLike,
        shares: ArrayLike | Sequence[Sequence[int]],
        *,
        start: int = 0,
        channel: int = 0,
        run: int = 1,
    ) -> int:
        """Adds the transfers of `part`, beginning in round `start`. Returns the round after the
        last round of `part`.

        Rank r of `part` becomes `ranks[r]`. Piece p of `part` (its whole vector, if it has no
        pieces) becomes the shares `shares[p]`, on all ranks. To add `part` several times, on
        different ranks, give `ranks` and `shares` one more axis in front. Each piece must then have
        the same number of shares. With `run`, a number in `shares` stands for `run` adjacent
        shares.
        """
        parts = part.collective.parts
        unit = self.unit * run
        assert unit % parts == 0, "the unit is a multiple of the parts"
        width = unit // parts
        t = part.columns
        members = np.asarray(ranks, np.int64).reshape(-1, part.collective.ranks)
        shared = _rectangle(shares)
        copies = len(members)
        shared = shared.reshape(copies, -1, shared.shape[-1])
        cuts = np.arange(parts)[:, None] * width
        places = (shared[:, :, None] * unit + cuts).reshape(copies, -1, shared.shape[-1])
        places = np.concatenate((places, self._scratch(part.scratch, places, width)), axis=1)

        row, src, dst, count = _placed(t, places, width)
        line, at = np.divmod(row, max(1, len(t)))
        round_, channels = start + t.round[at], channel + t.channel[at]
        ends = members[line, t.src[at]], members[line, t.dst[at]]
        self.builder.extend(
            Columns.of(round_, ends[0], src, ends[1], dst, count, t.reduce[at], channels)
        )
        return start + part.num_rounds

    def _scratch(self, locations: int, places: Numbers, width: int) -> Numbers:
        """Allocates scratch of the composed schedule for the scratch locations of an added
        schedule. Each location is as large as one chunk of the added schedule.
        """
        lines, _, shares = places.shape
        base = self.builder.collective.num_chunks + self.builder.scratch
        self.builder.scratch += locations * shares * width
        taken = base + np.arange(locations * shares).reshape(1, locations, shares) * width
        return taken.repeat(lines, axis=0)

    def build(self) -> Schedule:
        """Returns the composed schedule."""
        return self.builder.build()


def runs(chunks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields (first, count) for each run of adjacent chunks.

    >>> list(runs([4, 0, 1, 5, 7]))
    [(0, 2), (4, 2), (7, 1)]
    """
    first = count = 0
    for chunk in sorted(chunks):
        if count and chunk == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = chunk, 1
    if count:
        yield first, count


def backwards(schedule: Schedule) -> Schedule:
    """Returns the reversed schedule, which performs the opposite operation.

    An all-gather becomes a reduce-scatter, a broadcast a reduce, a scatter a gather. The order of
    rounds and the direction of every transfer are reversed. The result is correct if each rank
    receives each chunk at most once. The schedules of all callers meet this condition. Source:
    Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and
    experience" (2007), duals.
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
    """Returns a schedule that runs several schedules in sequence, on all ranks.

    For example, an all-reduce is a reduce-scatter and an all-gather. The root is the root of the
    parts.
    """
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
    """Returns a schedule that runs several schedules at the same time, each on an equal share of
    the vector.

    All parts perform the same operation. The ranks of part i are `orders[i]`. By default, the order
    is the same in all parts.
    """
    first = parts[0].collective
    op, ranks, count = first.op, first.ranks, len(parts)
    if op is Op.BARRIER:
        raise UnsupportedError("barrier moves no data; remove the channels")
    unit = lcm(*(part.collective.parts for part in parts))
    composer = Composer(replace(first, parts=count * unit), unit)
    channel = 0
    for i, part in enumerate(parts):
        order: Sequence[int] = range(ranks) if orders is None else orders[i]
        shares = [[piece * count + i] for piece in _pieces(op, order)]
        composer.add(part, order, shares, channel=channel)
        channel += 1 + int(part.columns.channel.max(initial=0))
    return composer.build()


def on_ranks(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Returns the schedule with other rank numbers: `order[r]` replaces rank r. The pieces are
    renumbered accordingly.
    """
    if list(order) == list(range(len(order))):
        return schedule
    collective = schedule.collective
    root = None if collective.root is None else order[collective.root]
    composer = Composer(replace(collective, root=root), collective.parts)
    composer.add(schedule, order, [[piece] for piece in _pieces(collective.op, order)])
    return composer.build()


def _pieces(op: Op, order: Sequence[int]) -> list[int]:
    """Returns the new number of each piece after rank r gets the number `order[r]`."""
    if op in BY_PART:
        return [0]
    if op is Op.ALL_TO_ALL:
        return [src * len(order) + dst for src in order for dst in order]
    return list(order)


def _rectangle(shares: ArrayLike | Sequence[Sequence[int]]) -> Numbers:
    """Returns the shares of each piece as rows of an array. Rows of pieces with fewer shares end
    with -1.
    """
    lengths = {len(piece) for piece in shares} if isinstance(shares, list) else set()
    if len(lengths) < 2 and 0 not in lengths:
        return np.asarray(shares, np.int64)
    rows: Sequence[Sequence[int]] = shares  # type: ignore[assignment]
    most = max(1, *lengths)
    return np.array([[*row, *[-1] * (most - len(row))] for row in rows], np.int64)


def _placed(t: Columns, places: Numbers, width: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Maps the transfers of an added schedule to moves in the composed schedule. Each chunk of the
    added schedule stands for several places in the composed schedule. A place consists of `width`
    adjacent chunks.

    The result has four arrays, with one entry per move: the number of the transfer, the source, the
    destination, and the number of chunks. Adjacent moves are merged. The numbers of transfers
    continue from line to line. A chunk corresponds to `places[line, chunk]`, an array of places.
    Negative entries are unused.
    """
    lines, _, shares = places.shape
    of, offset, each = _cut(t, places, width)
    row = (np.arange(lines)[:, None] * len(t) + of).repeat(shares)
    size = np.broadcast_to(each, (lines, len(of))).repeat(shares)
    src = places[:, t.src_chunk[of] + offset].ravel()
    dst = places[:, t.dst_chunk[of] + offset].ravel()
    if len(src) and src.min() < 0:
        row, size, dst, src = row[src >= 0], size[src >= 0], dst[src >= 0], src[src >= 0]
    assert len(src) == 0 or dst.min() >= 0, "what moves has as many shares where it goes"
    key = row * (int(src.max(initial=0)) + 1) + src
    if (key[1:] < key[:-1]).any():
        order = key.argsort(kind="stable")
        row, size, src, dst = row[order], size[order], src[order], dst[order]
    new = np.ones(len(row), np.bool_)
    new[1:] = row[1:] != row[:-1]
    new[1:] |= (src[1:] != src[:-1] + size[:-1]) | (dst[1:] != dst[:-1] + size[:-1])
    at = np.flatnonzero(new)
    return row[at], src[at], dst[at], np.add.reduceat(size, at) if len(at) else size


def _cut(t: Columns, places: Numbers, width: int) -> tuple[Numbers, Numbers, Numbers]:
    """Cuts all transfers of an added schedule into single chunks, if the chunks of any transfer are
    not adjacent in the composed schedule.

    Returns three arrays, with one entry per resulting transfer: the number of the original
    transfer, the offset of the first chunk in the original transfer, and the number of adjacent
    chunks in the composed schedule.
    """
    count = t.count.astype(np.int64)
    broken = (places[:, 1:] != places[:, :-1] + width).any(axis=(0, 2))
    run = np.concatenate(([0], broken.cumsum()))
    if all((run[at] == run[at + count - 1]).all() for at in (t.src_chunk, t.dst_chunk)):
        return np.arange(len(t)), np.zeros(len(t), np.int64), count * width
    of = np.arange(len(t)).repeat(count)
    offset = np.arange(len(of)) - (count.cumsum() - count).repeat(count)
    return of, offset, np.full(len(of), width)
