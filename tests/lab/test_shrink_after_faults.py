"""Shrinking over several hosts, after the loss of a rank, a host or a link."""

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
    """Shrinks to the survivors repeatedly, until a shrink fails."""
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
    """Checks that the ranks `left` form the new group; `former` has their ranks in the previous
    group.
    """
    for new, said in enumerate(job.wait_for(f"shrunk {generation}", left)):
        assert (said["rank"], said["ranks"]) == (new, list(former))


def check_cannot(job: Job, ranks: Sequence[int]) -> None:
    for said in job.wait_for("cannot", ranks):
        assert "cannot shrink" in said["text"] and "beyond a network failure" in said["text"]


def may_shrink(job: Job, left: Sequence[int]) -> bool:
    """Returns True if the hosts of these ranks had more than half of all ranks, or exactly half
    with rank 0 among them.
    """
    reached = job.ranks_on(*(job.host_of[rank] for rank in left))
    return (2 * len(reached), 0 in reached) > (job.ranks, False)


LOSSES: dict[str, tuple[Callable[[Job], float], Callable[[Job], list[int]]]] = {
    "last": (lambda job: job.kill(job.ranks - 1), lambda job: [job.ranks - 1]),
    "first": (lambda job: job.kill(0), lambda job: [0]),
    "last-host": (lambda job: job.kill_host(last_host(job)), last_ranks),
    "first-host": (lambda job: job.kill_host(0), lambda job: job.ranks_on(0)),
}


@pytest.mark.parametrize(("loss", "layout"), in_layouts(LOSSES))
def test_the_survivors_shrink(lab: Lab, loss: str, layout: Sequence[int]) -> None:
    do, who = LOSSES[loss]
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        lost = who(job)
        do(job)
        left = job.others(lost)
        if may_shrink(job, left):
            shrunk(job, 1, left, left)
        else:
            check_cannot(job, left)


@pytest.mark.parametrize(("victims", "layout"), in_layouts([(3, 2), (0, 1), (0, 3)]))
def test_the_survivors_shrink_again(
    lab: Lab, victims: tuple[int, int], layout: Sequence[int]
) -> None:
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        job.kill(victims[0])
        first = job.others(victims[:1])
        shrunk(job, 1, first, first)
        job.kill(victims[1])
        left = job.others(victims)
        shrunk(job, 2, left, [first.index(rank) for rank in left])


@pytest.mark.parametrize(("host", "layout"), in_layouts(["last", "first"]))
def test_one_side_of_a_cut_shrinks(lab: Lab, host: str, layout: Sequence[int]) -> None:
    """Cuts the network. The side with more ranks shrinks, or the side with rank 0 if both are
    equal. The other side gets an error.
    """
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        cut_off = 0 if host == "first" else last_host(job)
        job.cut(cut_off)
        one, other = job.ranks_on(cut_off), job.others(job.ranks_on(cut_off))
        larger = max(one, other, key=lambda side: (len(side), 0 in side))
        shrunk(job, 1, larger, larger)
        check_cannot(job, job.others(larger))


def test_a_reused_address_proves_no_loss(lab: Lab) -> None:
    """Cuts the network and reuses addresses: each host also gets the other host's address, and
    refuses connections there. Rank 1 must not take the refusal as proof that rank 0 is lost.
    """
    with Job(lab, shrinking, (1, 1)) as job:
        job.wait_for("joined", range(2))
        job.cut(1)
        for host in range(2):
            lab.run(host, ["ip", "addr", "add", f"{lab.address(1 - host)}/32", "dev", "lo"])
        try:
            shrunk(job, 1, [0], [0])
            check_cannot(job, [1])
        finally:
            for host in range(2):
                lab.run(host, ["ip", "addr", "del", f"{lab.address(1 - host)}/32", "dev", "lo"])


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_a_host_without_power_counts_as_perhaps_alive(lab: Lab, layout: Sequence[int]) -> None:
    """Powers a host off, which looks like a cut network. The other hosts may shrink only if they
    had a majority of the ranks.
    """
    with Job(lab, shrinking, layout) as job:
        job.wait_for("joined", range(job.ranks))
        job.power_off(0)
        left = job.others(job.ranks_on(0))
        if may_shrink(job, left):
            shrunk(job, 1, left, left)
        else:
            check_cannot(job, left)
