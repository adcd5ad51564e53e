"""Faults of networks and hosts: every survivor names the lost ranks within 3 s.

The fault occurs during calls and messages in all phases (`traffic.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from lab import bodies
from lab.bodies import CALL_TIMEOUT_S
from lab.job import (
    DISKS,
    Job,
    Outcome,
    fill_disks,
    last_host,
    last_ranks,
    mend_all,
    names,
    wait_for_no_remains,
)
from lab.layouts import LAYOUTS, in_layouts
from lab.switch import needs_hosts
from ranks import Me
from time_limits import limit_s
from unisono.bench.lab import Lab

pytestmark = [pytest.mark.lab, needs_hosts]

SOON_S = 3.0
"""Time within which every survivor names the lost ranks of another host."""
SURVIVED_S = 1.0
"""A cut of this length is survived. After it, the kernel may take a second to reach the other host
again."""
PAUSE_S = 0.3
"""Time from the first finished call to the fault: calls are in progress then."""
ROUNDS = 50


# ---- faults that lose ranks


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the last host, of a rank on the last host, or of a rank on the first host."""

    name: str
    do: Callable[[Job], float]
    lost: Callable[[Job], list[int]]
    body: Callable[[Me], Any] = bodies.busy
    errors: tuple[str, ...] = ("PeerLostError",)
    within_s: float = SOON_S
    blamed: Callable[[Job], list[int]] | None = None
    """If given, each lost rank is alive, and its own error must name one of these ranks."""
    often: bool = False
    """True if the scenario is part of the default test run."""


def last_rank(job: Job) -> list[int]:
    return [job.ranks - 1]


def all_ranks(job: Job) -> list[int]:
    return list(range(job.ranks))


def garbage(name: str, body: Callable[[Me], Any], *, often: bool = False) -> Fault:
    """Returns the fault that the last rank, which is authenticated, sends random bytes during
    calls. The other ranks must name it as lost. Its own error names any rank as lost, itself or
    another; this depends on timing.
    """
    return Fault(
        name=name,
        do=lambda job: job.ask(job.ranks - 1),
        lost=last_rank,
        body=body,
        errors=("PeerLostError", "UnisonoError"),
        blamed=all_ranks,
        often=often,
    )


FAULTS = [
    Fault(name="killed", do=lambda job: job.kill(job.ranks - 1), lost=last_rank, often=True),
    Fault(name="first-killed", do=lambda job: job.kill(0), lost=lambda job: [0], often=True),
    Fault(
        name="host-killed",
        do=lambda job: job.kill_host(last_host(job)),
        lost=last_ranks,
        often=True,
    ),
    Fault(
        name="power-off", do=lambda job: job.power_off(last_host(job)), lost=last_ranks, often=True
    ),
    Fault(
        name="first-power-off", do=lambda job: job.power_off(0), lost=lambda job: job.ranks_on(0)
    ),
    Fault(
        name="cut",
        do=lambda job: job.cut(last_host(job)),
        lost=last_ranks,
        blamed=lambda job: job.others(last_ranks(job)),
        often=True,
    ),
    Fault(
        name="cut-in-receive",
        do=lambda job: job.cut(last_host(job)),
        lost=last_ranks,
        body=bodies.receiving,
        blamed=lambda job: job.others(last_ranks(job)),
        often=True,
    ),
    Fault(
        name="pulled",
        do=lambda job: job.cut(last_host(job), carrier=False),
        lost=last_ranks,
        blamed=lambda job: job.others(last_ranks(job)),
    ),
    Fault(
        name="stopped",
        do=lambda job: job.stop(job.ranks - 1),
        lost=last_rank,
        body=bodies.impatient,
        errors=("CollectiveTimeoutError",),
        within_s=CALL_TIMEOUT_S + 1.0,
        often=True,
    ),
    garbage("garbage", bodies.garbling, often=True),
    garbage("zeros", bodies.zeroing),
    garbage("garbage-in-the-star", bodies.garbling_control),
]


def run_fault(lab: Lab, layout: Sequence[int], fault: Fault) -> None:
    """Runs a fault during calls and messages. Every survivor names the lost ranks in time, in all
    pending calls and messages. Further calls fail with the same cause. Survivors release all
    resources, and nothing remains on any host.
    """
    with Job(lab, fault.body, layout) as job:
        job.wait_for("joined", range(job.ranks))
        time.sleep(PAUSE_S)
        lost = fault.lost(job)
        rest = job.others(lost)
        since = fault.do(job)
        ended = job.outcomes("ended", rest, since=since)
        check(ended, lost, fault)
        check_messages(job, rest, lost, fault, since)
        if fault.blamed is not None:
            check(job.outcomes("ended", lost, since=since), fault.blamed(job), fault)
            check_messages(job, lost, fault.blamed(job), fault, since)
        again = job.outcomes("again", rest, since=since)
        assert [o.error for o in again] == [o.error for o in ended]
        all_given_back(job, rest)
    assert wait_for_no_remains(lab, range(lab.hosts)) == []


def check(outcomes: Sequence[Outcome], lost: Sequence[int], fault: Fault) -> None:
    for outcome in outcomes:
        assert outcome.error in fault.errors, outcome
        assert outcome.names(lost), outcome
        assert outcome.after_s < limit_s(fault.within_s), outcome


def check_messages(
    job: Job, ranks: Sequence[int], lost: Sequence[int], fault: Fault, since: float
) -> None:
    """Checks that the fault ended each receive. A send may have ended before the fault."""
    for said in job.wait_for("messages", ranks):
        assert said["at"] - since < limit_s(fault.within_s + SOON_S), said
        assert any(not message["sends"] for message in said["outcomes"]), said
        for message in said["outcomes"]:
            if message["sends"] and message["error"] is None:
                continue
            assert message["error"] in fault.errors, message
            assert names(message["text"], lost), message


def all_given_back(job: Job, ranks: Sequence[int]) -> None:
    for said in job.wait_for("closed", ranks):
        assert said["after"] == said["before"], "descriptors or threads were not given back"


# ---- faults that lose no ranks, or are detected later


def half_open(lab: Lab, layout: Sequence[int]) -> None:
    """Powers a host off while ranks are idle. They detect the loss before the next call."""
    with Job(lab, bodies.idle, layout) as job:
        job.wait_for("joined", range(job.ranks))
        lost = last_ranks(job)
        rest = job.others(lost)
        since = job.power_off(last_host(job))
        calls = job.wait_for("calls", rest)
        for said, outcome in zip(calls, job.outcomes("ended", rest, since=since), strict=True):
            assert outcome.error == "PeerLostError", outcome
            assert outcome.names(lost), outcome
            assert outcome.after_s - (said["at"] - since) < limit_s(1.0), outcome
        all_given_back(job, rest)
    assert wait_for_no_remains(lab, range(lab.hosts)) == []


def short_cut(lab: Lab, layout: Sequence[int], *, carrier: bool) -> None:
    """Cuts a link for a short time; no rank gets an error."""
    with Job(lab, bodies.patient, layout) as job:
        job.wait_for("joined", range(job.ranks))
        time.sleep(PAUSE_S)
        since = job.cut_for(SURVIVED_S, last_host(job), carrier=carrier)
        outcomes = job.outcomes("ended", range(job.ranks), since=since)
        assert [outcome.error for outcome in outcomes] == [None] * job.ranks, outcomes
        assert job.exit_codes() == [0] * job.ranks
    assert wait_for_no_remains(lab, range(lab.hosts)) == []


def full_disk(lab: Lab, layout: Sequence[int]) -> None:
    """Fills a host's disk; this has no effect, since the library writes no files."""
    fill_disks(lab, 1)
    try:
        with Job(lab, bodies.patient, layout) as job:
            assert job.exit_codes() == [0] * job.ranks
    finally:
        for disk in DISKS:
            lab.run(1, ["rm", f"{disk}/full"])
    assert wait_for_no_remains(lab, range(lab.hosts)) == []


def few_descriptors(lab: Lab, layout: Sequence[int], descriptors: int) -> None:
    """Limits a rank to too few descriptors. The rank reports this, and no rank waits until the
    timeout.
    """
    with Job(lab, bodies.patient, layout, descriptors={2: descriptors}) as job:
        codes = job.exit_codes()
        said = [event for rank in range(job.ranks) for event in job.everything(rank)]
        texts = [event["text"] for event in said if event.get("error")]
        if texts or any(codes):  # too few to join
            assert len(texts) == job.ranks, (
                said
            )  # each rank has an error, and at least one error names the cause
            assert any("open files" in text or "descriptors" in text for text in texts), texts
    assert wait_for_no_remains(lab, range(lab.hosts)) == []


Round = Callable[[Lab, Sequence[int]], None]


def scarce(lab: Lab, layout: Sequence[int], counts: Iterator[int]) -> None:
    few_descriptors(lab, layout, next(counts))


SCENARIOS: dict[str, Round] = {
    **{fault.name: partial(run_fault, fault=fault) for fault in FAULTS},
    "half-open": half_open,
    "short-cut": partial(short_cut, carrier=True),
    "short-pull": partial(short_cut, carrier=False),
    "full-disk": full_disk,
    "few-descriptors": partial(scarce, counts=itertools.cycle([*range(14, 30), *range(5, 14)])),
}
SELDOM = {fault.name for fault in FAULTS if not fault.often}


@pytest.mark.parametrize(("name", "layout"), in_layouts(SCENARIOS, SELDOM))
def test_a_scenario_ends_as_specified(lab: Lab, name: str, layout: Sequence[int]) -> None:
    SCENARIOS[name](lab, layout)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SCENARIOS)
def test_fifty_rounds_of_a_scenario_end_as_specified(lab: Lab, name: str) -> None:
    for number in range(ROUNDS):
        SCENARIOS[name](lab, LAYOUTS[number % len(LAYOUTS)])
        mend_all(lab)
