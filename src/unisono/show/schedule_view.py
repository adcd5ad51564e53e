"""Everything that table, picture and page tell about a schedule, worked out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.algorithms import build, describe, find
from unisono.errors import ScheduleError, UnisonoError
from unisono.schedule import Schedule, Transfer, check
from unisono.show.cells import Cells
from unisono.show.holdings import Held, Holdings, Place, Played, holdings
from unisono.show.placement import Link
from unisono.show.scale import Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """One round with transfers: what the schedule says, what it did, how much is done after it.

    `sent` and `links` count chunks that left a rank, by rank and by link; local moves are none.
    """

    number: int
    transfers: Sequence[Transfer]
    played: Played
    sent: Counter[int]
    links: Counter[Link]
    done: int

    @property
    def kind(self) -> str:
        """Whether the round reduces, copies, or both."""
        return " and ".join(
            word
            for word, reduce in (("reduce", True), ("copy", False))
            if any(t.reduce is reduce for t in self.transfers)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule, told. `problem` says what is wrong with it, if something is."""

    schedule: Schedule
    scale: Scale
    cells: Cells
    holdings: Holdings
    scenes: tuple[RoundView, ...]
    wanted: int
    summary: str
    source: str
    problem: str | None

    @property
    def title(self) -> str:
        """Operation, algorithm, ranks, and root if there is one."""
        collective = self.schedule.collective
        ranks = f"{collective.ranks} rank{'s' if collective.ranks != 1 else ''}"
        root = "" if collective.root is None else f", root {collective.root}"
        return f"{collective.op} by {self.schedule.algorithm}, {ranks}{root}"

    @property
    def links(self) -> Counter[Link]:
        """Chunks that each link carries in all."""
        return sum((scene.links for scene in self.scenes), Counter())

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Names and values: rounds, transfers, bytes of ranks and links."""
        ranks = range(self.schedule.collective.ranks)
        links = self.links
        sent, received = Counter[int](), Counter[int]()
        for (src, dst), count in links.items():
            sent[src] += count
            received[dst] += count
        return [
            ("rounds", str(len(self.scenes))),
            ("chunk", self.scale.text(1)),
            ("a rank sends", self.scale.span(sent[rank] for rank in ranks)),
            ("a rank receives", self.scale.span(received[rank] for rank in ranks)),
            ("links used", str(len(links))),
            ("a link carries", self.scale.span(links.values())),
        ]

    def is_done(self, place: Place, held: Held | None) -> bool:
        """Whether the place holds a finished chunk that its rank must have in the end."""
        return held is not None and _is_done(self.schedule, place, held)


def view(schedule: Schedule, *, nbytes: int | None = None) -> ScheduleView:
    """Work out the story of a schedule; with `nbytes`, the bytes of a rank's larger buffer.

    A wrong schedule is told too, with its problem. Raises `ScheduleError` only when it names
    ranks or chunks that do not exist.

    >>> story = view(build("all_reduce", "ring", ranks=4))
    >>> story.title, len(story.scenes), dict(story.facts)["a rank sends"]
    ('all_reduce by ring, 4 ranks', 6, '1.5 N')
    """
    collective = schedule.collective
    schedule = _in_order(schedule)
    ours = _is_ours(schedule)
    about = describe(find(collective.op, schedule.algorithm)) if ours else None
    played = holdings(schedule)
    return ScheduleView(
        schedule=schedule,
        scale=Scale.of(collective, nbytes),
        cells=Cells.of(schedule),
        holdings=played,
        scenes=_scenes(schedule, played),
        wanted=sum(len(collective.wanted(rank)) for rank in range(collective.ranks)),
        summary=about.summary if about else "",
        source=about.source if about else "",
        problem=None if ours else _problem(schedule),
    )


def _scenes(schedule: Schedule, played: Holdings) -> tuple[RoundView, ...]:
    done = {place for place, held in played.start.items() if _is_done(schedule, place, held)}
    scenes = []
    columns = schedule.columns
    carried = columns.src, columns.dst, columns.count
    told = zip(schedule.rounds(), columns.rounds(), played.rounds, strict=True)
    for (number, transfers), (_, rows), moved in told:
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
        scenes.append(
            RoundView(
                number=number,
                transfers=transfers,
                played=moved,
                sent=sent,
                links=links,
                done=len(done),
            )
        )
    return tuple(scenes)


def _is_done(schedule: Schedule, place: Place, held: Held) -> bool:
    rank, location = place
    collective = schedule.collective
    if location >= collective.num_chunks or held.chunk != location:
        return False
    if collective.op.reduces and held.mask != (1 << len(collective.summands(rank))) - 1:
        return False
    return collective.wants(rank, location)


def _in_order(schedule: Schedule) -> Schedule:
    """The schedule, whose transfers must be ordered by round."""
    if (np.diff(schedule.columns.round) < 0).any():
        raise ScheduleError("the transfers are not ordered by round")
    return schedule


def _is_ours(schedule: Schedule) -> bool:
    """Whether this is what the algorithm of that name returns; those are proved by the tests."""
    collective, name = schedule.collective, schedule.algorithm
    try:
        ours = build(collective.op, name, ranks=collective.ranks, root=collective.root or 0)
    except UnisonoError:
        return False
    return ours == schedule


def _problem(schedule: Schedule) -> str | None:
    try:
        check(schedule)
    except ScheduleError as error:
        return str(error)
    return None
