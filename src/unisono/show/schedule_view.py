"""Computes the data of a schedule that the table, the picture and the page show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.algorithms import build, describe, find
from unisono.errors import ScheduleError, UnisonoError
from unisono.schedule import Schedule, Transfer, check
from unisono.show.cells import Cells
from unisono.show.chunk_amounts import Scale
from unisono.show.holdings import Held, Holdings, Place, ReplayedRound, holdings
from unisono.show.placement import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """One round: its transfers, their effect, and `done`, the number of locations that have their
    final contents after the round.

    `sent` has the number of chunks that each rank sends to other ranks, and `links` the number of
    chunks that each link carries. Transfers within a rank do not count.
    """

    number: int
    transfers: Sequence[Transfer]
    replayed: ReplayedRound
    sent: Counter[int]
    links: Counter[Link]
    done: int

    @property
    def kind(self) -> str:
        """The kind of the round's transfers: reduce, copy, or both."""
        return " and ".join(
            word
            for word, reduce in (("reduce", True), ("copy", False))
            if any(t.reduce is reduce for t in self.transfers)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """The data of a schedule for drawings. `problem` describes the error of an invalid schedule."""

    schedule: Schedule
    scale: Scale
    cells: Cells
    holdings: Holdings
    rounds: tuple[RoundView, ...]
    wanted: int
    summary: str
    source: str
    problem: str | None

    @property
    def title(self) -> str:
        """Operation, algorithm, ranks, and root if the operation has one."""
        collective = self.schedule.collective
        ranks = f"{collective.ranks} rank{'s' if collective.ranks != 1 else ''}"
        root = "" if collective.root is None else f", root {collective.root}"
        return f"{collective.op} by {self.schedule.algorithm}, {ranks}{root}"

    @property
    def links(self) -> Counter[Link]:
        """Total number of chunks that each link carries."""
        return sum((round_.links for round_ in self.rounds), Counter())

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Facts as (name, value): the number of rounds, the size of a chunk, and the amounts of
        data that ranks send and receive and that links carry."""
        ranks = range(self.schedule.collective.ranks)
        links = self.links
        sent, received = Counter[int](), Counter[int]()
        for (src, dst), count in links.items():
            sent[src] += count
            received[dst] += count
        return [
            ("rounds", str(len(self.rounds))),
            ("chunk", self.scale.text(1)),
            ("a rank sends", self.scale.span(sent[rank] for rank in ranks)),
            ("a rank receives", self.scale.span(received[rank] for rank in ranks)),
            ("links used", str(len(links))),
            ("a link carries", self.scale.span(links.values())),
        ]

    def is_done(self, place: Place, held: Held | None) -> bool:
        """Returns True if the location has its final contents: a chunk that its rank must have at
        the end, with all contributions."""
        return held is not None and _is_done(self.schedule, place, held)


def view(schedule: Schedule, *, nbytes: int | None = None) -> ScheduleView:
    """Returns the data of a schedule for drawings. `nbytes` is the size of a rank's larger buffer.

    The view of an invalid schedule has a `problem`. Raises `ScheduleError` only if a transfer has a
    rank or chunk that does not exist, or if transfers are not ordered by round.

    >>> ring = view(build("all_reduce", "ring", ranks=4))
    >>> ring.title, len(ring.rounds), dict(ring.facts)["a rank sends"]
    ('all_reduce by ring, 4 ranks', 6, '1.5 N')
    """
    collective = schedule.collective
    schedule = _in_order(schedule)
    builtin = _is_builtin(schedule)
    about = describe(find(collective.op, schedule.algorithm)) if builtin else None
    replayed = holdings(schedule)
    return ScheduleView(
        schedule=schedule,
        scale=Scale.of(collective, nbytes),
        cells=Cells.of(schedule),
        holdings=replayed,
        rounds=_rounds(schedule, replayed),
        wanted=sum(len(collective.wanted(rank)) for rank in range(collective.ranks)),
        summary=about.summary if about else "",
        source=about.source if about else "",
        problem=None if builtin else _problem(schedule),
    )


def _rounds(schedule: Schedule, replayed: Holdings) -> tuple[RoundView, ...]:
    done = {place for place, held in replayed.start.items() if _is_done(schedule, place, held)}
    rounds = []
    columns = schedule.columns
    carried = columns.src, columns.dst, columns.count
    replays = zip(schedule.rounds(), columns.rounds(), replayed.rounds, strict=True)
    for (number, transfers), (_, rows), moved in replays:
        for place, held in moved.writes.items():
            if _is_done(schedule, place, held):
                done.add(place)
            else:
                done.discard(place)
        sent, links = Counter[int](), Counter[Link]()
        for src, dst, count in zip(*(column[rows].tolist() for column in carried), strict=True):
            if src != dst:
                sent[src] += count
                links[src, dst] += count
        rounds.append(
            RoundView(
                number=number,
                transfers=transfers,
                replayed=moved,
                sent=sent,
                links=links,
                done=len(done),
            )
        )
    return tuple(rounds)


def _is_done(schedule: Schedule, place: Place, held: Held) -> bool:
    rank, location = place
    collective = schedule.collective
    if location >= collective.num_chunks or held.chunk != location:
        return False
    if collective.op.reduces and held.mask != (1 << len(collective.summands(rank))) - 1:
        return False
    return collective.wants(rank, location)


def _in_order(schedule: Schedule) -> Schedule:
    """Returns the schedule unchanged. Raises `ScheduleError` if its transfers are not ordered by
    round."""
    if (np.diff(schedule.columns.round) < 0).any():
        raise ScheduleError("the transfers must be ordered by round")
    return schedule


def _is_builtin(schedule: Schedule) -> bool:
    """Returns True if the schedule is equal to the built-in schedule of the same name, which tests
    have proved correct."""
    collective, name = schedule.collective, schedule.algorithm
    try:
        builtin = build(collective.op, name, ranks=collective.ranks, root=collective.root or 0)
    except UnisonoError:
        return False
    return builtin == schedule


def _problem(schedule: Schedule) -> str | None:
    try:
        check(schedule)
    except ScheduleError as error:
        return str(error)
    return None
