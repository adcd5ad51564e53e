"""Translates the times of several ranks and hosts to one clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.timeline.clock_offset import ClockAlignment, ClockReading
from unisono.timeline.rank_dump import RankDump
from unisono.timeline.rank_spans import RankSpans, spans_of

_Links = dict[str, dict[str, list[ClockReading]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedRank:
    """One rank's dump, its intervals, and the translation of its times to the common clock."""

    dump: RankDump
    spans: RankSpans
    alignment: ClockAlignment
    calendar_ns: int
    """The Unix time at which the common clock showed 0, according to the calendar clock of one
    host."""

    def unix_ns(self, time_ns: int) -> int:
        """Converts a time of the rank's clock to Unix time, in ns. Results of different ranks are
        comparable within the ranks' `error_ns`."""
        return self.alignment.to_common_ns(time_ns) + self.calendar_ns

    @property
    def error_ns(self) -> int | None:
        """Largest error in ns of the rank's times relative to the common clock. None if the clocks
        were never compared."""
        if not self.alignment.measured:
            return None
        return max(self.alignment.error_ns(each) for each in self.spans.extent)


def align_ranks(dumps: Sequence[RankDump]) -> list[AlignedRank]:
    """Returns the ranks in order, with their clocks aligned. A pure function.

    The common clock is the clock with which most ranks compared their own clock. Ranks that share a
    clock share its comparisons. The offsets of a chain of comparisons add up. A clock that was
    never compared is aligned by the hosts' calendar clocks.

    >>> align_ranks([])
    []
    """
    ordered = sorted(dumps, key=lambda dump: (dump.job, dump.rank, dump.pid, dump.now_ns))
    if not ordered:
        return []
    links = _links(ordered)
    counts = Counter(each.reference for dump in ordered for each in dump.readings)
    common = counts.most_common(1)[0][0] if counts else ordered[0].clock
    measured = _measured(links, common)
    calendar_ns = _calendar_ns(ordered, measured, common)
    return [
        AlignedRank(
            dump=dump,
            spans=spans_of(dump),
            alignment=measured.get(dump.clock) or _by_calendar(dump, calendar_ns),
            calendar_ns=calendar_ns,
        )
        for dump in ordered
    ]


def _links(dumps: Sequence[RankDump]) -> _Links:
    """Returns the comparisons of each clock with each other clock, in both directions."""
    links: _Links = {}
    for dump in dumps:
        for each in dump.readings:
            back = replace(
                each,
                at_ns=each.at_ns + each.offset_ns,
                offset_ns=-each.offset_ns,
                reference=dump.clock,
            )
            links.setdefault(dump.clock, {}).setdefault(each.reference, []).append(each)
            links.setdefault(each.reference, {}).setdefault(dump.clock, []).append(back)
    return links


def _measured(links: _Links, common: str) -> dict[str, ClockAlignment]:
    """Returns the alignment of each clock that was compared with the clock `common`, directly or
    through other clocks."""
    found = {common: ClockAlignment(readings=())}
    reached = deque([common])
    while reached:
        near = reached.popleft()
        for far in links.get(near, {}):
            if far not in found:
                found[far] = _through(found[near], links[far][near], common)
                reached.append(far)
    return found


def _through(near: ClockAlignment, readings: Sequence[ClockReading], common: str) -> ClockAlignment:
    """Returns the alignment of a clock, from its comparisons with another clock whose alignment
    `near` is known."""
    composed: list[ClockReading] = []
    for each in sorted(readings, key=lambda reading: reading.at_ns):
        near_ns = each.at_ns + each.offset_ns
        composed.append(
            ClockReading(
                at_ns=each.at_ns,
                offset_ns=near.to_common_ns(near_ns) - each.at_ns,
                error_ns=each.error_ns + near.error_ns(near_ns),
                reference=common,
            )
        )
    return ClockAlignment(readings=tuple(composed))


def _calendar_ns(
    dumps: Sequence[RankDump], measured: dict[str, ClockAlignment], common: str
) -> int:
    """Returns the Unix time at which the common clock showed 0. If a host with the common clock has
    a dump, the calendar clock of this host is used."""
    known = [dump for dump in dumps if dump.clock in measured] or list(dumps)
    nearest = min(known, key=lambda dump: (dump.clock != common, dump.rank))
    alignment = measured.get(nearest.clock, ClockAlignment(readings=()))
    return nearest.wall_ns - alignment.to_common_ns(nearest.now_ns)


def _by_calendar(dump: RankDump, calendar_ns: int) -> ClockAlignment:
    guess = ClockReading(
        at_ns=dump.now_ns,
        offset_ns=dump.wall_ns - dump.now_ns - calendar_ns,
        error_ns=0,
        reference="",
    )
    return ClockAlignment(readings=(guess,), measured=False)


def missing_ranks(dumps: Sequence[RankDump]) -> dict[str, tuple[int, ...]]:
    """Returns the ranks without a dump, by job. Jobs with all dumps are not in the result.

    >>> missing_ranks([])
    {}
    """
    found: dict[str, set[int]] = {}
    size: dict[str, int] = {}
    for dump in dumps:
        found.setdefault(dump.job, set()).add(dump.rank)
        size[dump.job] = max(size.get(dump.job, 0), dump.size)
    return {
        job: tuple(rank for rank in range(size[job]) if rank not in ranks)
        for job, ranks in found.items()
        if len(ranks) < size[job]
    }
