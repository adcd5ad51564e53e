"""Shrinking over hosts: who goes on after a rank, a host or a link is lost."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

import pytest

from lab.bodies import add_up, endless
from lab.job import Job, last_host, last_ranks
from lab.layouts import in_layouts
from lab.switch import needs_hosts
from ranks import Me
from unisono import AbortedError, Communicator, PeerLostError
from unisono.bench.lab import Lab

pytestmark = [pytest.mark.lab, needs_hosts]


def shrinking(me: Me) -> None:
    """Goes on with the survivors, again and again, until it is told that it cannot."""
    comm = me.join(30.0)
    add_up(comm, 10)
    me.say("joined")
    for generation in itertools.count(1):
        with contextlib.suppress(PeerLostError):
            endless(comm)
        try:
            comm = comm.shrink()
        except AbortedError as error:
            me.say("cannot", text=str(error))
            return
        add_up(comm, 1000)
        _add_up_in_halves(comm)
        me.say(f"shrunk {generation}", rank=comm.rank, ranks=comm.former_ranks)


def _add_up_in_halves(comm: Communicator) -> None:
    half = comm.split(comm.rank % 2)
    assert half is not None
    with half:
        add_up(half, 1000)


def shrunk(job: Job, generation: int, left: Sequence[int], former: Sequence[int]) -> None:
    """`left` went on, numbered `former` in the group before."""
    for new, said in enumerate(job.wait_for(f"shrunk {generation}", left)):
        assert (said["rank"], said["ranks"]) == (new, list(former))


def cannot(job: Job, ranks: Sequence[int]) -> None:
    for said in job.wait_for("cannot", ranks):
        assert "cannot go on" in said["text"] and "beyond a cut" in said["text"]


def may_go_on(job: Job, left: Sequence[int]) -> bool:
    """Whether the hosts of these ranks had more than half of all, or half with rank 0."""
    reached = job.ranks_on(*(job.host_of[rank] for rank in left))
    return (2 * len(reached), 0 in reached) > (job.ranks, False)


LOSSES: dict[str, tuple[Callable[[Job], float], Callable[[Job], list[int]]]] = {
    "last": (lambda job: job.kill(job.ranks - 1), lambda job: [job.ranks - 1]),
    "first": (lambda job: job.kill(0), lambda job: [0]),
    "last-host": (lambda job: job.kill_host(last_host(job)), last_ranks),
    "first-host": (lambda job: job.kill_host(0), lambda job: job.ranks_on(0)),
}


@pytest.mark.parametrize(("loss", "layout"), in_layouts(LOSSES))
def test_the_survivors_go_on(lab: Lab, loss: str, layout: Sequence[int]) -> None:
    do, who = LOSSES[loss]
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        lost = who(job)
        do(job)
        left = job.others(lost)
        if may_go_on(job, left):
            shrunk(job, 1, left, left)
        else:
            cannot(job, left)


@pytest.mark.parametrize(("victims", "layout"), in_layouts([(3, 2), (0, 1), (0, 3)]))
def test_and_go_on_again(lab: Lab, victims: tuple[int, int], layout: Sequence[int]) -> None:
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        job.kill(victims[0])
        first = job.others(victims[:1])
        shrunk(job, 1, first, first)
        job.kill(victims[1])
        left = job.others(victims)
        shrunk(job, 2, left, [first.index(rank) for rank in left])


@pytest.mark.parametrize(("host", "layout"), in_layouts(["last", "first"]))
def test_one_side_of_a_cut_goes_on(lab: Lab, host: str, layout: Sequence[int]) -> None:
    """The one with more ranks, or with rank 0 of equally many; the other is told why not."""
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        cut_off = 0 if host == "first" else last_host(job)
        job.cut(cut_off)
        one, other = job.ranks_on(cut_off), job.others(job.ranks_on(cut_off))
        goes_on = max(one, other, key=lambda side: (len(side), 0 in side))
        shrunk(job, 1, goes_on, goes_on)
        cannot(job, job.others(goes_on))


def test_an_address_that_was_given_away_says_nothing(lab: Lab) -> None:
    """Beyond a cut each side finds the other's address at somebody who refuses."""
    with Job(lab, shrinking, (1, 1)) as job:
        job.wait_for("joined", range(2))
        job.cut(1)
        for host in range(2):
            lab.run(host, ["ip", "addr", "add", f"{lab.address(1 - host)}/32", "dev", "lo"])
        try:
            shrunk(job, 1, [0], [0])
            cannot(job, [1])
        finally:
            for host in range(2):
                lab.run(host, ["ip", "addr", "del", f"{lab.address(1 - host)}/32", "dev", "lo"])


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_a_host_without_power_may_live_for_all_one_knows(lab: Lab, layout: Sequence[int]) -> None:
    """It is silent, as beyond a cut: what is left goes on only if it is enough."""
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        job.power_off(0)
        left = job.others(job.ranks_on(0))
        if may_go_on(job, left):
            shrunk(job, 1, left, left)
        else:
            cannot(job, left)
