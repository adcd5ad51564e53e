"""What networks and hosts do, and what every survivor must then see: who is lost, within 3 s."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lab.job import Job, Outcome, await_no_remains, census, fill_disks, give_disks
from lab.switch import needs_hosts
from ranks import Me
from unisono import AbortedError, Communicator, PeerLostError
from unisono.bench.lab import Lab

pytestmark = [pytest.mark.lab, needs_hosts]

SOON_S = 3.0
"""Within this every survivor knows who is lost on another host."""
CALL_TIMEOUT_S = 4.0
"""Of a call that waits for a rank of which nothing can be known."""
PAUSE_S = 0.3
"""From the first finished call to the fault: calls are under way then."""
LAYOUTS = [(1, 1, 1, 1), (2, 2), (3, 1)]
ROUNDS = 50


def layout_name(layout: Sequence[int]) -> str:
    return "+".join(map(str, layout))


# ---- the ranks


def busy(me: Me) -> None:
    """Calls of all sizes, on and on, until one fails."""
    _until_it_fails(me, timeout_s=30.0)


def impatient(me: Me) -> None:
    """The same with a short timeout."""
    _until_it_fails(me, timeout_s=CALL_TIMEOUT_S)


def _until_it_fails(me: Me, timeout_s: float) -> None:
    before = census()
    _one_communicator(me, timeout_s)
    me.say("closed", before=before, after=census())


def _one_communicator(me: Me, timeout_s: float) -> None:
    with me.join(timeout_s) as comm:
        _add_up(comm, 10)
        me.say("joined")
        me.attempt("ended", _endless, comm)
        me.attempt("again", comm.barrier)  # it refuses further work with the same cause


def idle(me: Me) -> None:
    """Joined, then asleep outside of calls until the fault is long over."""
    comm = me.join(30.0)
    _add_up(comm, 10)
    me.say("joined")
    time.sleep(2 * SOON_S)
    me.say("calls")
    me.attempt("ended", _endless, comm)
    comm.close()


def patient(me: Me) -> None:
    """Works for about four seconds, and checks each sum."""
    comm = me.join(20.0)
    me.say("joined")
    me.attempt("ended", _work_for, comm, 4.0)
    comm.close()


def shrinking(me: Me) -> None:
    """Goes on with the survivors, again and again, until it is told that it cannot."""
    comm = me.join(30.0)
    _add_up(comm, 10)
    me.say("joined")
    for generation in itertools.count(1):
        with contextlib.suppress(PeerLostError):
            _endless(comm)
        try:
            comm = comm.shrink()
        except AbortedError as error:
            me.say("cannot", text=str(error))
            return
        _add_up(comm, 1000)
        _add_up_in_halves(comm)
        me.say(f"shrunk {generation}", rank=comm.rank, ranks=comm.former_ranks)


def _add_up_in_halves(comm: Communicator) -> None:
    half = comm.split(comm.rank % 2)
    assert half is not None
    with half:
        _add_up(half, 1000)


def _endless(comm: Communicator) -> None:
    while True:
        _add_up(comm, 1)
        _add_up(comm, 100_000)


def _work_for(comm: Communicator, seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    going = np.ones(1, dtype=np.int32)
    while going[0]:
        _add_up(comm, 50_000)
        going[0] = time.monotonic() < deadline_s
        comm.all_reduce(going, "min")  # all stop at the same call


def _add_up(comm: Communicator, count: int) -> None:
    x = np.arange(count, dtype=np.float64) + comm.rank
    comm.all_reduce(x)
    total = np.arange(count) * comm.size + comm.size * (comm.size - 1) / 2
    assert (x == total).all()


# ---- the faults


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to the last host, or to a rank on it or on the first."""

    name: str
    do: Callable[[Job], float]
    lost: Callable[[Job], list[int]]
    body: Callable[[Me], Any] = busy
    error: str = "PeerLostError"
    within_s: float = SOON_S
    others_live: bool = False
    """Whether those that are lost live on, and see the rest as lost."""


def last_host(job: Job) -> int:
    return max(job.host_of)


def last_ranks(job: Job) -> list[int]:
    return job.ranks_on(last_host(job))


FAULTS = [
    Fault(name="killed", do=lambda job: job.kill(job.ranks - 1), lost=lambda job: [job.ranks - 1]),
    Fault(name="first-killed", do=lambda job: job.kill(0), lost=lambda job: [0]),
    Fault(name="host-killed", do=lambda job: job.kill_host(last_host(job)), lost=last_ranks),
    Fault(name="power-off", do=lambda job: job.power_off(last_host(job)), lost=last_ranks),
    Fault(
        name="first-power-off", do=lambda job: job.power_off(0), lost=lambda job: job.ranks_on(0)
    ),
    Fault(name="cut", do=lambda job: job.cut(last_host(job)), lost=last_ranks, others_live=True),
    Fault(
        name="stopped",
        do=lambda job: job.stop(job.ranks - 1),
        lost=lambda job: [job.ranks - 1],
        body=impatient,
        error="CollectiveTimeoutError",
        within_s=CALL_TIMEOUT_S + 1.0,
    ),
]


def suffer(lab: Lab, layout: Sequence[int], fault: Fault) -> None:
    """One round: the fault happens amid calls; every survivor names who is lost, in time, refuses
    further work with the same cause, and gives back what it had; nothing is left on any host."""
    with Job(lab, fault.body, layout) as job:
        job.wait_for("joined", range(job.ranks))
        time.sleep(PAUSE_S)
        lost = fault.lost(job)
        rest = job.others(lost)
        since = fault.do(job)
        check(job.outcomes("ended", rest, since=since), lost, fault)
        if fault.others_live:
            check(job.outcomes("ended", lost, since=since), rest, fault)
        again = job.outcomes("again", rest, since=since)
        ended = job.outcomes("ended", rest, since=since)
        assert [o.error for o in again] == [o.error for o in ended]
        for said in job.wait_for("closed", rest):
            assert said["after"] == said["before"], "descriptors or threads were not given back"
    assert await_no_remains(lab, range(lab.hosts)) == []


def check(outcomes: Sequence[Outcome], lost: Sequence[int], fault: Fault) -> None:
    for outcome in outcomes:
        assert outcome.error == fault.error, outcome
        assert outcome.names(lost), outcome
        assert outcome.after_s < fault.within_s, outcome


def heal(lab: Lab) -> None:
    for host in range(lab.hosts):
        for rail in range(lab.rails):
            lab.mend(host, rail)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    with Lab(hosts=4) as lab:
        give_disks(lab)
        yield lab


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    for host in range(cluster.hosts):
        cluster.kill(host)
    heal(cluster)


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_survivor_names_the_lost(lab: Lab, fault: Fault, layout: Sequence[int]) -> None:
    suffer(lab, layout, fault)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fifty_of_fifty(lab: Lab, fault: Fault) -> None:
    for number in range(ROUNDS):
        suffer(lab, LAYOUTS[number % len(LAYOUTS)], fault)
        heal(lab)


# ---- what is no fault, or seen later


def test_a_host_that_fell_silent_while_all_were_idle(lab: Lab) -> None:
    """A half-open connection: nothing was under way when the other end vanished."""
    with Job(lab, idle, (1, 1, 1)) as job:
        job.wait_for("joined", range(3))
        since = job.power_off(2)
        calls = job.wait_for("calls", [0, 1])
        for said, outcome in zip(calls, job.outcomes("ended", [0, 1], since=since), strict=True):
            assert outcome.error == "PeerLostError"
            assert outcome.names([2])
            assert outcome.after_s - (said["at"] - since) < 0.5  # known long before


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_a_short_cut_is_survived(lab: Lab, layout: Sequence[int]) -> None:
    with Job(lab, patient, layout) as job:
        job.wait_for("joined", range(job.ranks))
        time.sleep(PAUSE_S)
        since = job.cut(last_host(job))
        time.sleep(0.8)
        job.mend(last_host(job))
        outcomes = job.outcomes("ended", range(job.ranks), since=since)
        assert [outcome.error for outcome in outcomes] == [None] * job.ranks
        assert job.exit_codes() == [0] * job.ranks
    assert await_no_remains(lab, range(lab.hosts)) == []


# ---- shrinking


def shrunk(job: Job, generation: int, left: Sequence[int], former: Sequence[int]) -> None:
    """`left` went on, numbered `former` in the group before."""
    for new, said in enumerate(job.wait_for(f"shrunk {generation}", left)):
        assert (said["rank"], said["ranks"]) == (new, list(former))


LOSSES: dict[str, tuple[Callable[[Job], float], Callable[[Job], list[int]]]] = {
    "last": (lambda job: job.kill(job.ranks - 1), lambda job: [job.ranks - 1]),
    "first": (lambda job: job.kill(0), lambda job: [0]),
    "last-host": (lambda job: job.kill_host(last_host(job)), last_ranks),
    "first-host": (lambda job: job.kill_host(0), lambda job: job.ranks_on(0)),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_survivors_go_on(lab: Lab, loss: str, layout: Sequence[int]) -> None:
    do, who = LOSSES[loss]
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        lost = who(job)
        do(job)
        shrunk(job, 1, job.others(lost), job.others(lost))


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("victims", [(3, 2), (0, 1), (0, 3)], ids=str)
def test_and_go_on_again(lab: Lab, victims: tuple[int, int], layout: Sequence[int]) -> None:
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        job.kill(victims[0])
        first = job.others(victims[:1])
        shrunk(job, 1, first, first)
        job.kill(victims[1])
        left = job.others(victims)
        shrunk(job, 2, left, [first.index(rank) for rank in left])


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("host", ["first", "last"])
def test_one_side_of_a_cut_goes_on(lab: Lab, host: str, layout: Sequence[int]) -> None:
    """The one with more ranks, or with rank 0 of equally many; the other is told why not."""
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        cut_off = 0 if host == "first" else last_host(job)
        job.cut(cut_off)
        one, other = job.ranks_on(cut_off), job.others(job.ranks_on(cut_off))
        goes_on = max(one, other, key=lambda side: (len(side), 0 in side))
        shrunk(job, 1, goes_on, goes_on)
        for said in job.wait_for("cannot", job.others(goes_on)):
            assert "cannot go on" in said["text"] and "beyond a cut" in said["text"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_a_host_without_power_may_live_for_all_one_knows(lab: Lab, layout: Sequence[int]) -> None:
    """It is silent, as beyond a cut: what is left goes on only if it is enough."""
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        job.power_off(0)
        left = job.others(job.ranks_on(0))
        if 2 * len(left) > job.ranks:
            shrunk(job, 1, left, left)
        else:
            job.wait_for("cannot", left)


def test_a_full_disk_does_not_matter(lab: Lab) -> None:
    fill_disks(lab, 1)
    with Job(lab, patient, (2, 2)) as job:
        assert job.exit_codes() == [0] * 4
    for path in ("/tmp/full", "/dev/shm/full"):
        lab.run(1, ["rm", path])


@pytest.mark.parametrize("descriptors", [6, 10, 14, 20])
def test_no_descriptors_left_is_told_by_name(lab: Lab, descriptors: int) -> None:
    """Where it is too few, the rank says so, and nobody waits for it in vain."""
    with Job(lab, patient, (2, 2), descriptors={2: descriptors}) as job:
        codes = job.exit_codes()
        if codes == [0] * 4:
            return  # it was enough
        said = [event for rank in range(4) for event in job.everything(rank)]
        texts = [event["text"] for event in said if event.get("error")]
        assert len(texts) == 4  # each rank has an error, and one of them the cause
        assert any("open files" in text for text in texts)
    assert await_no_remains(lab, range(lab.hosts)) == []
