"""A schedule: an ordered, immutable list of transfers, free of message size."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from unisono.schedule.collective import Collective

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Move `count` chunks from one rank's locations to another's, in one round.

    All transfers of a round read the state before it; their writes land after it. With
    `src == dst` the move is local. A reducing transfer combines with what the destination holds:
    all reducing transfers of one round into one location are one n-ary reduction, its operands
    in the order of their source ranks, the destination's own value at its own rank's place.
    """

    round: int
    src: int
    src_chunk: int
    dst: int
    dst_chunk: int
    count: int = 1
    reduce: bool = False
    channel: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How to perform a collective: transfers ordered by round.

    Locations `num_chunks .. num_chunks + scratch - 1` of each rank are private and start empty.
    """

    collective: Collective
    algorithm: str
    transfers: tuple[Transfer, ...]
    scratch: int = 0

    @property
    def num_rounds(self) -> int:
        """Number of rounds, empty ones included."""
        return max((t.round for t in self.transfers), default=-1) + 1

    @property
    def num_locations(self) -> int:
        """Locations of each rank: logical chunks, then scratch."""
        return self.collective.num_chunks + self.scratch

    def rounds(self) -> Iterator[tuple[int, tuple[Transfer, ...]]]:
        """Each round that has transfers, with them; the transfers must be ordered by round."""
        for number, group in groupby(self.transfers, key=attrgetter("round")):
            yield number, tuple(group)

    def chunks_sent(self, rank: int) -> int:
        """Chunks the rank sends to other ranks; the chunk's size is piece bytes / parts."""
        return sum(t.count for t in self.transfers if t.src == rank != t.dst)

    def chunks_received(self, rank: int) -> int:
        """Chunks the rank receives from other ranks."""
        return sum(t.count for t in self.transfers if t.dst == rank != t.src)


class Builder:
    """Collects transfers and keeps the round counter.

    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=3, root=0), "chain")
    >>> b.copy(0, 0, 1)
    >>> b.next_round()
    >>> b.copy(1, 0, 2)
    >>> b.build().num_rounds
    2
    """

    def __init__(self, collective: Collective, algorithm: str, *, scratch: int = 0) -> None:
        self.collective = collective
        self.algorithm = algorithm
        self.scratch = scratch
        self.round = 0
        self._transfers: list[Transfer] = []

    def copy(
        self,
        src: int,
        src_chunk: int,
        dst: int,
        dst_chunk: int | None = None,
        *,
        count: int = 1,
        channel: int = 0,
    ) -> None:
        """Add a copy in the current round; `dst_chunk` defaults to `src_chunk`."""
        self._add(src, src_chunk, dst, dst_chunk, count=count, channel=channel, reduce=False)

    def reduce(
        self,
        src: int,
        src_chunk: int,
        dst: int,
        dst_chunk: int | None = None,
        *,
        count: int = 1,
        channel: int = 0,
    ) -> None:
        """Add a reduction into the destination in the current round."""
        self._add(src, src_chunk, dst, dst_chunk, count=count, channel=channel, reduce=True)

    def next_round(self) -> None:
        """Everything added from here on sees what was written so far."""
        self.round += 1

    def build(self) -> Schedule:
        """The schedule; transfers are ordered by round, otherwise as they were added."""
        return Schedule(
            collective=self.collective,
            algorithm=self.algorithm,
            transfers=tuple(sorted(self._transfers, key=attrgetter("round"))),
            scratch=self.scratch,
        )

    def _add(
        self,
        src: int,
        src_chunk: int,
        dst: int,
        dst_chunk: int | None,
        *,
        count: int,
        channel: int,
        reduce: bool,
    ) -> None:
        self._transfers.append(
            Transfer(
                round=self.round,
                src=src,
                src_chunk=src_chunk,
                dst=dst,
                dst_chunk=src_chunk if dst_chunk is None else dst_chunk,
                count=count,
                reduce=reduce,
                channel=channel,
            )
        )
