"""Splits each rank's time in a training step by cause, and finds the rank for which other ranks
waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from unisono.timeline.aligned_ranks import missing_ranks
from unisono.timeline.event_kinds import CONTROLLER_THREAD, FORWARD, PHASES
from unisono.timeline.interval_sets import difference, intersection, seconds, union
from unisono.timeline.rank_dump import RankDump
from unisono.timeline.rank_spans import (
    Interval,
    PhaseSpan,
    RankSpans,
    WaitSpan,
    spans_of,
)

OTHER = "outside of forward, backward and optimizer"
_NOTABLE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """Times of one step on one rank, in seconds. A step lasts until the next step begins."""

    rank: int
    step: int
    step_s: float
    compute_s: float
    """Time in forward, backward and optimizer, without waits."""
    communication_s: float
    """Time in which at least one collective ran."""
    hidden_s: float
    """The part of `communication_s` during which the rank computed."""
    waited_s: float
    """Time in which the program waited for a tensor."""
    phases_s: Mapping[str, float]
    """The parts of `own_s`: forward, backward, optimizer, and the remaining time."""

    @property
    def exposed_s(self) -> float:
        """The part of `communication_s` during which the rank did not compute."""
        return self.communication_s - self.hidden_s

    @property
    def own_s(self) -> float:
        """Time of the step without the rank's waits."""
        return self.step_s - self.waited_s

    @property
    def overlap(self) -> float:
        """Fraction of the communication during which the rank computed; 1 without communication."""
        return self.hidden_s / self.communication_s if self.communication_s else 1.0

    @property
    def scale_factor(self) -> float:
        """Ratio of the throughput of n ranks to n times the throughput of a rank that never
        waits."""
        return self.own_s / self.step_s if self.step_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowestRank:
    """The rank with the longest time without waits in a step. `part` is the phase, or the time
    outside of phases, in which this rank exceeds the median of all ranks by the most."""

    rank: int
    part: str
    part_s: float
    median_s: float
    """Median over all ranks of the time in `part`, in seconds."""

    @property
    def text(self) -> str:
        """The rank, its time in `part`, and the median of all ranks in ms, as text."""
        return (
            f"rank {self.rank}: {1e3 * self.part_s:.2f} ms {self.part}, "
            f"median {1e3 * self.median_s:.2f} ms"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One step on all ranks whose events contain it. `slowest` is None for one rank, or if the
    ranks differ by less than 1 % of the step."""

    step: int
    ranks: tuple[RankStep, ...]
    slowest: SlowestRank | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """The completely recorded steps of one job."""

    job: str
    size: int
    missing_ranks: tuple[int, ...]
    lost_events: int
    steps: tuple[StepSummary, ...]

    def medians(self) -> list[tuple[int, RankStep]]:
        """Returns the number of steps and the medians of their times, by rank."""
        by_rank: dict[int, list[RankStep]] = {}
        for step in self.steps:
            for each in step.ranks:
                by_rank.setdefault(each.rank, []).append(each)
        return [(len(found), _median_step(found)) for _, found in sorted(by_rank.items())]

    def slowest_line(self) -> str:
        """Returns a line of text: which rank was slowest most often, in which phase, and how many
        ms it took more than the median of all ranks."""
        found = [step.slowest for step in self.steps if step.slowest is not None]
        if not found:
            return "No rank is slower than the others by 1 % of a step."
        often = Counter((each.rank, each.part) for each in found)
        (rank, part), count = often.most_common(1)[0]
        same = [each for each in found if (each.rank, each.part) == (rank, part)]
        excess_s = median(each.part_s - each.median_s for each in same)
        return (
            f"Slowest: rank {rank} in {count} of {len(self.steps)} steps, by {1e3 * excess_s:.2f} "
            f"ms {part} above the median of the ranks."
        )


def summarize_steps(dumps: Sequence[RankDump]) -> list[JobSummary]:
    """Returns the completely recorded steps of each job. A pure function. Clock errors have no
    effect, because only durations are compared between ranks.

    Steps of which events are overwritten or missing are omitted. Steps are numbered from the
    creation of the model on.

    >>> from unisono.timeline import TimelineWriter
    >>> summarize_steps([TimelineWriter(rank=0, size=1, events=64).dump()])[0].steps
    ()
    """
    missing = missing_ranks(dumps)
    jobs: dict[str, list[RankDump]] = {}
    for dump in sorted(dumps, key=lambda each: (each.rank, each.pid)):
        jobs.setdefault(dump.job, []).append(dump)
    return [
        JobSummary(
            job=job,
            size=max(dump.size for dump in found),
            missing_ranks=missing.get(job, ()),
            lost_events=sum(dump.lost for dump in found),
            steps=_steps(found),
        )
        for job, found in jobs.items()
    ]


def _steps(dumps: Sequence[RankDump]) -> tuple[StepSummary, ...]:
    by_step: dict[int, list[RankStep]] = {}
    for dump in dumps:
        for each in rank_steps(dump.rank, spans_of(dump)):
            by_step.setdefault(each.step, []).append(each)
    return tuple(
        StepSummary(step=step, ranks=tuple(ranks), slowest=_slowest(ranks))
        for step, ranks in sorted(by_step.items())
    )


def rank_steps(rank: int, spans: RankSpans) -> list[RankStep]:
    """Returns the completely recorded steps of one rank.

    >>> rank_steps(0, RankSpans(extent=Interval(0, 0)))
    []
    """
    by_step: dict[int, list[PhaseSpan]] = {}
    for phase in spans.phases:
        by_step.setdefault(phase.step, []).append(phase)
    found: list[RankStep] = []
    for step, phases in sorted(by_step.items()):
        if not all(phase.whole for phase in phases) or phases[0].name != FORWARD:
            continue
        after = by_step.get(step + 1)
        if after is None and not _has_ended(phases, by_step.get(step - 1)):
            continue
        ended_ns = after[0].when.begun_ns if after else _end(spans, phases)
        whole = Interval(phases[0].when.begun_ns, ended_ns)
        found.append(_rank_step(rank, step, whole, phases, spans))
    return found


def _has_ended(phases: Sequence[PhaseSpan], before: Sequence[PhaseSpan] | None) -> bool:
    """Returns True if a step has all phases of the previous step, or if there is no previous
    step."""
    return before is None or {each.name for each in before} <= {each.name for each in phases}


def _end(spans: RankSpans, phases: Sequence[PhaseSpan]) -> int:
    """Returns the time at which the last step ended: the end of its last phase, or of a wait that
    ended later."""
    ended = max(phase.when.ended_ns for phase in phases)
    return max([ended, *(wait.when.ended_ns for wait in _program_waits(spans))])


def _program_waits(spans: RankSpans) -> list[WaitSpan]:
    return [wait for wait in spans.waits if wait.thread != CONTROLLER_THREAD]


def _rank_step(
    rank: int, step: int, whole: Interval, phases: Sequence[PhaseSpan], spans: RankSpans
) -> RankStep:
    waits = intersection([whole], union(each.when for each in _program_waits(spans)))
    moved = union(each.moved for each in spans.collectives if each.moved and each.ran)
    moved = intersection([whole], moved)
    by_name = {
        name: difference(union(each.when for each in phases if each.name == name), waits)
        for name in PHASES
    }
    compute = union(each for times in by_name.values() for each in times)
    outside = difference(difference([whole], compute), waits)
    return RankStep(
        rank=rank,
        step=step,
        step_s=seconds([whole]),
        compute_s=seconds(compute),
        communication_s=seconds(moved),
        hidden_s=seconds(intersection(moved, compute)),
        waited_s=seconds(waits),
        phases_s={
            **{name: seconds(times) for name, times in by_name.items()},
            OTHER: seconds(outside),
        },
    )


def _slowest(ranks: Sequence[RankStep]) -> SlowestRank | None:
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=lambda each: each.own_s)
    if slowest.own_s - min(each.own_s for each in ranks) < _NOTABLE * slowest.step_s:
        return None
    medians = {part: median(each.phases_s[part] for each in ranks) for part in slowest.phases_s}
    part = max(medians, key=lambda each: slowest.phases_s[each] - medians[each])
    return SlowestRank(
        rank=slowest.rank, part=part, part_s=slowest.phases_s[part], median_s=medians[part]
    )


def _median_step(steps: Sequence[RankStep]) -> RankStep:
    names = ("step_s", "compute_s", "communication_s", "hidden_s", "waited_s")
    parts = steps[0].phases_s
    return RankStep(
        rank=steps[-1].rank,
        step=steps[-1].step,
        **{name: median(getattr(each, name) for each in steps) for name in names},
        phases_s={part: median(each.phases_s[part] for each in steps) for part in parts},
    )
