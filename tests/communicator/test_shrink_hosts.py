"""Recovery from lost ranks of several hosts: processes of one machine with different host
identities.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence

import numpy as np
import pytest

from blocked_calls import code_of, interrupt_in
from communicator.shrinking_hosts import RANKS, joined, over_hosts, says, slow, until_lost
from ranks import Me
from unisono import AbortedError

LAYOUTS: dict[str, Sequence[int]] = {
    "1+1+1+1": (0, 1, 2, 3),
    "2+2": (0, 0, 1, 1),
    "3+1": (0, 0, 0, 1),
}


# ---- no failure


def healthy(me: Me) -> None:
    comm = joined(me)
    with comm.shrink() as shrunk:
        says(me, shrunk)
        me.attempt("old", comm.barrier)
        me.attempt("again", comm.shrink)
        pair = shrunk.group([3, 0])
        half = shrunk.split(shrunk.rank % 2)
        assert half is not None
        comm.close()  # the new group does not need the old one
        if pair is not None:
            me.say("pair", sum=pair.all_reduce(np.array([me.rank])).tolist())
        me.say("half", sum=half.all_reduce(np.array([me.rank])).tolist())


@pytest.mark.parametrize("name", ["2+2", slow("1+1+1+1"), slow("3+1")])
def test_a_healthy_group_shrinks_to_all_its_ranks(name: str) -> None:
    with over_hosts(healthy, LAYOUTS[name]) as ranks:
        for new, said in enumerate(ranks.wait_for("shrunk", range(RANKS))):
            assert (said["rank"], said["ranks"]) == (new, [0, 1, 2, 3])
        for said in ranks.wait_for("old", range(RANKS)):
            assert "was shrunk to its ranks 0, 1, 2, 3" in said["text"]
        for said in ranks.wait_for("again", range(RANKS)):
            assert (said["error"], "without this rank" in said["text"]) == ("AbortedError", True)
        assert [said["sum"] for said in ranks.wait_for("pair", [0, 3])] == [[3], [3]]
        halves = [said["sum"] for said in ranks.wait_for("half", range(RANKS))]
        assert halves == [[2], [4], [2], [4]]
        assert ranks.exit_codes() == [0] * RANKS


# ---- ranks are killed


def two_generations(me: Me) -> None:
    comm = joined(me)
    until_lost(comm)
    first = comm.shrink()
    says(me, first, "first")
    until_lost(first)
    second = first.shrink()
    says(me, second, "second")
    comm.close()
    first.close()
    pair = second.split(0)
    assert pair is not None
    says(me, pair, "split")
    second.close()
    pair.close()


@pytest.mark.parametrize(
    ("name", "victims"),
    [
        ("2+2", (3, 0)),
        ("3+1", (0, 3)),
        slow("1+1+1+1", (0, 1)),
        slow("2+2", (0, 3)),
        slow("3+1", (1, 2)),
    ],
)
def test_a_shrunk_group_can_shrink_again(name: str, victims: tuple[int, int]) -> None:
    layout = LAYOUTS[name]
    left = sorted(set(range(RANKS)) - set(victims))
    with over_hosts(two_generations, layout) as ranks:
        ranks.wait_for("ready", range(RANKS))
        ranks.signal(victims[0], signal.SIGKILL)
        others = sorted(set(range(RANKS)) - {victims[0]})
        for new, said in enumerate(ranks.wait_for("first", others)):
            assert (said["former"], said["ranks"], said["rank"]) == (others, others, new)
        ranks.signal(victims[1], signal.SIGKILL)
        for new, said in enumerate(ranks.wait_for("second", left)):
            assert said["former"] == left
            assert (said["rank"], said["ranks"]) == (new, [others.index(r) for r in left])
        ranks.wait_for("split", left)
        codes = [-9 if rank in victims else 0 for rank in range(RANKS)]
        assert ranks.exit_codes() == codes


def once(me: Me) -> None:
    comm = joined(me)
    until_lost(comm)
    with comm.shrink() as shrunk:
        says(me, shrunk)


def test_shrink_survives_the_death_of_a_host() -> None:
    with over_hosts(once, (0, 0, 0, 1)) as ranks:
        ranks.wait_for("ready", range(RANKS))
        ranks.signal(3, signal.SIGKILL)
        for said in ranks.wait_for("shrunk", range(3)):
            assert (said["ranks"], said["hosts"]) == ([0, 1, 2], [[0, 1, 2]])


def shrinks_with_exclude(me: Me) -> None:
    """Shrinks with `exclude`, because too few ranks are left for a shrink without it."""
    comm = joined(me)
    until_lost(comm)
    me.attempt("cannot", comm.shrink)
    me.attempt("old", comm.barrier)
    with comm.shrink(exclude=[0, 1]) as shrunk:
        says(me, shrunk)


def test_too_few_ranks_go_on_with_exclude() -> None:
    """Kills half of the ranks. The other half can shrink only with `exclude`."""
    with over_hosts(shrinks_with_exclude, (0, 0, 1, 2)) as ranks:
        ranks.wait_for("ready", range(RANKS))
        for rank in (0, 1):
            ranks.signal(rank, signal.SIGKILL)
        for rank, said in zip((2, 3), ranks.wait_for("cannot", [2, 3]), strict=True):
            assert said["error"] == "AbortedError"
            assert f"rank {rank} cannot shrink" in said["text"]
            assert "shrink(exclude=[0, 1" in said["text"]
        for said in ranks.wait_for("old", [2, 3]):
            assert said["error"] == "AbortedError" or said["error"] == "PeerLostError"
        for said in ranks.wait_for("shrunk", [2, 3]):
            assert (said["ranks"], said["former"]) == ([2, 3], [2, 3])


# ---- a refused connection does not prove that a rank is lost


def refused_by_each_other(me: Me) -> None:
    """Simulates a partition: each rank closes its listener and its connections, so that the other
    rank's new connections are refused.
    """
    comm = joined(me)
    comm.barrier()
    sockets = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            sockets.append(socket.socket(fileno=os.dup(fd)))
    inet = [sock for sock in sockets if sock.family == socket.AF_INET]
    inet.sort(key=lambda sock: -sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    for sock in inet:  # closes the listeners first, so that later connections are refused
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    for sock in sockets:
        sock.close()
    until_lost(comm)
    try:
        shrunk = comm.shrink()
    except AbortedError as error:
        me.say("ended", text=str(error), ranks=None)
    else:
        me.say("ended", text="", ranks=shrunk.former_ranks)


def test_two_ranks_that_refuse_each_other_do_not_both_go_on() -> None:
    with over_hosts(refused_by_each_other, (0, 1)) as ranks:
        zero, one = ranks.wait_for("ended", range(2))
        assert zero["ranks"] == [0]
        assert one["ranks"] is None
        assert "rank 1 cannot shrink: it reaches the hosts of only 1 of the 2 ranks" in one["text"]


def dies_while_shrinking(me: Me) -> None:
    comm = joined(me)
    until_lost(comm)
    # rank 0, which would be the leader, dies after the other ranks have called shrink
    if me.rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    says(me, comm.shrink())


def test_shrink_survives_the_death_of_the_leader() -> None:
    with over_hosts(dies_while_shrinking, (0, 0, 1, 1, 2)) as ranks:
        ranks.wait_for("ready", range(5))
        ranks.signal(4, signal.SIGKILL)
        for said in ranks.wait_for("shrunk", [1, 2, 3]):
            assert said["former"] == [1, 2, 3]


# ---- live ranks are excluded


def excluded(me: Me) -> None:
    comm = joined(me)
    if me.rank in (0, 2):
        me.attempt("told", comm.all_reduce, np.ones(1))
        return
    comm = comm.shrink([0, 2])
    says(me, comm)


@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_excluded_ranks_get_an_error(layout: Sequence[int]) -> None:
    """Excludes half of the ranks, among them rank 0, which has the control server. They must get an
    error that names the remaining ranks. In one layout, the remaining ranks are all on one host, so
    that their group has no network.
    """
    with over_hosts(excluded, layout) as ranks:
        for said in ranks.wait_for("shrunk", [1, 3]):
            assert said["ranks"] == [1, 3]
        for said in ranks.wait_for("told", [0, 2]):
            assert (said["error"], "was shrunk to its ranks 1, 3" in said["text"]) == (
                "AbortedError",
                True,
            )


def late(me: Me) -> None:
    comm = joined(me)
    if me.rank == 0:
        me.stop()
        me.attempt("late", comm.shrink)
        return
    shrunk = comm.shrink(timeout_s=1.5)
    shrunk.timeout_s = 30
    says(me, shrunk)
    me.say("waiting")
    time.sleep(60)


def test_a_stopped_rank_is_left_out_and_gets_an_error_later() -> None:
    with over_hosts(late, (0, 1, 2)) as ranks:
        for said in ranks.wait_for("shrunk", [1, 2]):
            assert said["ranks"] == [1, 2]
        ranks.signal(0, signal.SIGCONT)
        (said,) = ranks.wait_for("late", [0])
        assert said["error"] == "AbortedError"
        assert said["text"].startswith("rank 0: the others formed a new group without this rank")


def half(me: Me) -> None:
    comm = joined(me)
    if me.rank == 0:
        me.stop()
    me.wait_for_go()
    me.attempt("ended", lambda: comm.shrink(timeout_s=1.0))
    says(me, comm.shrink(exclude=[0]))
    time.sleep(60)


def test_half_without_the_lowest_does_not_go_on() -> None:
    """Tests that rank 1 does not shrink without `exclude` after rank 0 was stopped. Rank 1 cannot
    know whether rank 0 continues.
    """
    with over_hosts(half, (0, 1)) as ranks:
        ranks.wait_for("ready", range(2))
        ranks.wait_for_stop(0)
        ranks.go(1)
        (said,) = ranks.wait_for("ended", [1])
        assert said["error"] == "AbortedError"
        assert said["text"] == (
            "rank 1 cannot shrink: it reaches the hosts of only 1 of the 2 ranks, [1]. It needs a "
            "majority of 2, or 1 with the lowest, rank 0. Ranks [0] may have survived beyond a "
            "network failure, and shrink there. If you know that they have ended, call "
            "shrink(exclude=[0]) on all ranks that are left"
        )
        assert ranks.wait_for("shrunk", [1])[0]["ranks"] == [1]


def interrupted(me: Me) -> None:
    comm = joined(me)
    if me.rank == 0:
        interrupt_in(code_of("recovery"))
        me.attempt("stopped", comm.shrink)
        time.sleep(60)
    me.wait_for_go()
    says(me, comm.shrink())


@pytest.mark.parametrize("layout", [(0, 1), slow((0, 1, 2))])
def test_an_interrupted_rank_has_left(layout: Sequence[int]) -> None:
    """Interrupts a rank during its shrink. The other ranks must shrink without it. While the
    interrupted process lives, its host still votes on the new group; without this vote there may be
    no majority.
    """
    with over_hosts(interrupted, layout) as ranks:
        assert ranks.wait_for("stopped", [0])[0]["error"] == "KeyboardInterrupt"
        left = list(range(1, len(layout)))
        ranks.go(*left)
        for said in ranks.wait_for("shrunk", left):
            assert said["ranks"] == left
