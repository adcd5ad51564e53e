"""Conversion of schedules to moves of single chunks, and of moves to schedules.

Passes that rewrite schedules work on moves. Adjacent moves with the same round, ranks, channel and
kind (copy or reduce) become one transfer.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

from unisono.schedule.builder import Builder
from unisono.schedule.collective import Collective
from unisono.schedule.schedule import Schedule


class Move(NamedTuple):
    """A move of one chunk between two ranks. The order of moves is by round, ranks, kind, channel,
    then chunks.
    """

    round: int
    src: int
    dst: int
    reduce: bool
    channel: int
    src_chunk: int
    dst_chunk: int


def moves_of(schedule: Schedule) -> list[Move]:
    """Returns all moves of a schedule, in the order of its transfers."""
    return [
        Move(t.round, t.src, t.dst, t.reduce, t.channel, t.src_chunk + i, t.dst_chunk + i)
        for _, transfers in schedule.rounds()
        for t in transfers
        for i in range(t.count)
    ]


def assemble(
    collective: Collective, algorithm: str, moves: Iterable[Move], *, scratch: int = 0
) -> Schedule:
    """Returns the schedule that consists of these moves.

    >>> from unisono.types import Op
    >>> collective = Collective(op=Op.BROADCAST, ranks=2, parts=2, root=0)
    >>> moves = [Move(0, 0, 1, False, 0, part, part) for part in (0, 1)]
    >>> [t.count for t in assemble(collective, "direct", moves).transfers]
    [2]
    """
    b = Builder(collective, algorithm, scratch=scratch)
    ordered = sorted(moves)
    start = 0
    while start < len(ordered):
        first, count = ordered[start], 1
        while start + count < len(ordered) and ordered[start + count] == first._replace(
            src_chunk=first.src_chunk + count, dst_chunk=first.dst_chunk + count
        ):
            count += 1
        while b.round < first.round:
            b.next_round()
        add = b.reduce if first.reduce else b.copy
        add(
            first.src,
            first.src_chunk,
            first.dst,
            first.dst_chunk,
            count=count,
            channel=first.channel,
        )
        start += count
    return b.build()


def coarsen(schedule: Schedule) -> Schedule:
    """Returns an equivalent schedule that cuts each piece into as few parts as possible. Adjacent
    parts with equal moves become one part.

    Programs for thousands of threads cut a message into more parts than their algorithm needs. The
    comparison ignores channels. A joined part gets the channels of its first part. Returns a
    schedule unchanged if it uses scratch, or if it moves a part to the location of another part.

    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, parts=6, root=0), "halves")
    >>> b.copy(0, 0, 1, count=3)
    >>> b.next_round()
    >>> b.copy(0, 3, 1, count=3)
    >>> coarsen(b.build()).collective.parts
    2
    """
    collective, moves = schedule.collective, moves_of(schedule)
    parts = collective.parts
    if schedule.scratch or not _keep_parts(moves, collective):
        return schedule
    by_part: list[list[Move]] = [[] for _ in range(parts)]
    for m in moves:
        by_part[m.src_chunk % parts].append(m)
    factor = _joinable_parts(by_part)
    if factor == 1:
        return schedule
    smaller = Collective(
        op=collective.op, ranks=collective.ranks, parts=parts // factor, root=collective.root
    )
    # The number of a chunk is piece * parts + part. `factor` is a divisor of `parts` and of the
    # part numbers of the kept moves.
    kept = (
        m._replace(src_chunk=m.src_chunk // factor, dst_chunk=m.dst_chunk // factor)
        for part in by_part[::factor]
        for m in part
    )
    return assemble(smaller, schedule.algorithm, kept)


def _keep_parts(moves: list[Move], collective: Collective) -> bool:
    """Returns True if every move goes to a location with the same part number, and no move uses
    scratch.
    """
    inside = range(collective.num_chunks)
    return all(
        m.src_chunk in inside
        and m.dst_chunk in inside
        and (m.src_chunk - m.dst_chunk) % collective.parts == 0
        for m in moves
    )


def _joinable_parts(by_part: list[list[Move]]) -> int:
    """Returns the largest k such that each group of k adjacent parts has equal moves, and can
    therefore become one part. k is a divisor of the number of parts.
    """
    parts = len(by_part)
    routes = [
        sorted(
            (m.round, m.src, m.dst, m.reduce, m.src_chunk // parts, m.dst_chunk // parts)
            for m in part
        )
        for part in by_part
    ]
    return gcd(parts, *(at for at in range(1, parts) if routes[at] != routes[at - 1]))
