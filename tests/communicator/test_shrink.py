"""Recovery from lost ranks, with real processes that are killed and stopped."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blocked_calls import code_of, interrupt_in
from ranks import Me, Processes, Threads
from time_limits import limit_s
from unisono import (
    AbortedError,
    CollectiveTimeoutError,
    CommunicationError,
    Communicator,
    PeerLostError,
    UnsupportedError,
)
from unisono.communicator import Rule, Selection

MOST_S = 3.0


def says(me: Me, comm: Communicator, event: str = "shrunk") -> None:
    """Exchanges data in the group and checks them. Then tells the test which ranks are members of
    the group.
    """
    former = comm.all_gather(np.array([me.rank])).tolist()
    total = comm.all_reduce(np.full(3, 10.0**me.rank)).tolist()
    assert total == [sum(10.0**rank for rank in former)] * 3
    assert comm.hosts == (tuple(range(comm.size)),)
    me.say(event, former=former, rank=comm.rank, ranks=comm.former_ranks)


def until_lost(comm: Communicator) -> None:
    with pytest.raises(PeerLostError):
        while True:
            comm.all_reduce(np.ones(1000))


# ---- ranks as threads, without a death


def test_a_healthy_group_shrinks_to_all_its_ranks() -> None:
    def check(comm: Communicator) -> None:
        with comm.shrink() as shrunk:
            assert (shrunk.rank, shrunk.size) == (comm.rank, 3)
            assert shrunk.former_ranks == (0, 1, 2)
            assert shrunk.all_reduce(np.ones(2)).tolist() == [3, 3]
            with pytest.raises(AbortedError, match="was shrunk to its ranks 0, 1, 2"):
                comm.barrier()
        with pytest.raises(AbortedError, match="formed a new group without this rank"):
            comm.shrink()  # a second shrink

    with Threads(3) as world:
        assert world.outcomes(check) == [None] * 3


def test_shrink_works_after_any_other_failure() -> None:
    def disagree(comm: Communicator) -> Any:
        return comm.all_reduce(np.ones(1 + comm.rank))

    def abort(comm: Communicator) -> Any:
        if comm.rank == 1:
            comm.abort("enough")
        return comm.barrier()

    def be_late(comm: Communicator) -> Any:
        if comm.rank == 1:
            assert timed_out.wait(20)
            return comm.barrier()
        comm.timeout_s = 0.1
        try:
            return comm.barrier()
        finally:
            timed_out.set()

    def check(comm: Communicator, fail: Callable[[Communicator], Any]) -> None:
        with pytest.raises(CommunicationError) as caught:
            fail(comm)
        comm.timeout_s = 20
        with comm.shrink() as shrunk:
            assert shrunk.former_ranks == (0, 1, 2)
            assert shrunk.timeout_s == 20
            shrunk.barrier()
        with pytest.raises(type(caught.value)) as again:
            comm.barrier()  # the old communicator keeps its error
        assert str(again.value) == str(caught.value)

    timed_out = threading.Event()
    for fail in (disagree, abort, be_late):
        with Threads(3) as world:
            assert world.outcomes(check, fail) == [None] * 3


def test_excluded_ranks_get_an_error_in_their_next_call() -> None:
    def check(comm: Communicator) -> Any:
        if comm.rank in (0, 3):
            with pytest.raises(AbortedError, match="was shrunk to its ranks 1, 2, 4"):
                comm.barrier()
            return None
        with comm.shrink([3, 0]) as shrunk:
            return shrunk.all_gather(np.array([comm.rank])).tolist()

    with Threads(5) as world:
        assert world.outcomes(check) == [None, [1, 2, 4], [1, 2, 4], None, [1, 2, 4]]


def test_wrong_arguments_of_shrink_are_refused() -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"exclude: expected ranks of 0\.\.1, not \[-1, 2\]"):
            comm.shrink([2, -1])
        with pytest.raises(ValueError, match="excluded rank must not call shrink"):
            comm.shrink([comm.rank])
        with pytest.raises(TypeError, match=r"expected a list of ranks such as \[2, 3\], not 1"):
            comm.shrink(exclude=1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"exclude: expected a whole number, not '1'"):
            comm.shrink(exclude="1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected more than 0 seconds"):
            comm.shrink(timeout_s=0)
        with pytest.raises(UnsupportedError, match="inside a batch"), comm.batch():
            comm.shrink()
        comm.barrier()

    with Threads(2) as world:
        world.run(check)


def test_settings_and_selection_are_kept() -> None:
    rule = Rule(op="all_reduce", algorithm="ring")
    own = Rule(op="all_reduce", algorithm="direct")

    def check(comm: Communicator) -> list[str]:
        ringed = comm.split(0, selection=Selection(rules=(rule,)))
        assert ringed is not None
        once = ringed.shrink()
        twice = once.shrink(selection=Selection(rules=(own,)))
        return [str(c.explain("all_reduce", 4096).algorithm) for c in (ringed, once, twice)]

    with Threads(3) as world:
        assert world.run(check) == [["ring", "ring", "direct"]] * 3
    with Threads(2, reproducible=True) as world:
        assert world.outcomes(lambda comm: comm.shrink().reproducible) == [True] * 2


# ---- a rank is killed


def two_generations(me: Me) -> None:
    comm = me.join()
    comm.barrier()
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until_lost(comm)
    first = comm.shrink()
    says(me, first, "first")
    if first.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    until_lost(first)
    second = first.shrink()
    says(me, second, "second")
    me.attempt("old", comm.barrier)
    second.close()


def test_a_shrunk_group_can_shrink_again() -> None:
    with Processes(two_generations, 4) as ranks:
        for said in ranks.wait_for("first", [0, 2, 3]):
            assert said["former"] == said["ranks"] == [0, 2, 3]
        for new, said in enumerate(ranks.wait_for("second", [2, 3])):
            assert said["former"] == [2, 3]
            assert (said["rank"], said["ranks"]) == (new, [1, 2])
        for said in ranks.wait_for("old", [2, 3]):
            assert (said["error"], said["text"][:12]) == ("PeerLostError", "rank 1 (pid ")
        assert ranks.exit_codes() == [-9, -9, 0, 0]


def some_saw_it(me: Me) -> None:
    """Shrinks at different times: rank 0 at once, rank 1 when it detects a death, rank 2 late, rank
    4 when its receive fails. Rank 3 dies.
    """
    comm = me.join()
    comm.barrier()
    me.say("ready")
    if me.rank == 3:
        time.sleep(60)
    if me.rank == 1:
        until_lost(comm)
    if me.rank == 2:
        time.sleep(1.0)
    if me.rank == 4:
        with pytest.raises(PeerLostError):
            comm.recv(np.ones(1), 0)
    says(me, comm.shrink())


def test_ranks_agree_whether_or_not_they_saw_the_death() -> None:
    with Processes(some_saw_it, 5) as ranks:
        ranks.wait_for("ready", range(5))
        ranks.signal(3, signal.SIGKILL)
        for said in ranks.wait_for("shrunk", [0, 1, 2, 4]):
            assert said["former"] == said["ranks"] == [0, 1, 2, 4]


def dies_while_shrinking(me: Me) -> None:
    comm = me.join()
    comm.barrier()
    me.say("ready")
    if me.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    until_lost(comm)
    if me.rank == 2:  # the other ranks are already in shrink
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    says(me, comm.shrink())


def test_shrink_survives_another_death() -> None:
    with Processes(dies_while_shrinking, 5) as ranks:
        for said in ranks.wait_for("shrunk", [0, 1, 4]):
            assert said["former"] == [0, 1, 4]


# ---- a rank does not arrive


def late(me: Me) -> None:
    comm = me.join()
    comm.barrier()
    me.say("ready")
    if me.rank == 0:
        me.stop()
        me.attempt("late", comm.shrink)
        return
    comm.timeout_s = 1.0
    with pytest.raises(CollectiveTimeoutError):
        comm.barrier()
    started = time.monotonic()
    shrunk = comm.shrink()
    me.say("took", seconds=time.monotonic() - started)
    shrunk.timeout_s = 30
    says(me, shrunk)


def test_a_stopped_rank_is_left_out_and_gets_an_error_later() -> None:
    with Processes(late, 3) as ranks:
        for said in ranks.wait_for("shrunk", [1, 2]):
            assert said["ranks"] == [1, 2]
        took = [said["seconds"] for said in ranks.wait_for("took", [1, 2])]
        # the rank that shrinks first waits for the whole timeout, the other one less
        assert 0.9 < max(took) < limit_s(1.0 + MOST_S)
        ranks.signal(0, signal.SIGCONT)
        (said,) = ranks.wait_for("late", [0])
        assert said["error"] == "AbortedError"
        assert said["text"].startswith("rank 0: the others formed a new group without this rank")


def interrupted(me: Me) -> None:
    comm = me.join()
    comm.barrier()
    if me.rank == 2:
        interrupt_in(code_of("recovery"))
        me.attempt("stopped", comm.shrink)
        me.attempt("again", comm.shrink)
        return
    me.wait_for_go()
    says(me, comm.shrink())


def test_an_interrupted_rank_has_left() -> None:
    with Processes(interrupted, 3) as ranks:
        assert ranks.wait_for("stopped", [2])[0]["error"] == "KeyboardInterrupt"
        assert ranks.wait_for("again", [2])[0]["error"] == "AbortedError"
        ranks.go(0, 1)
        for said in ranks.wait_for("shrunk", [0, 1]):
            assert said["ranks"] == [0, 1]


# ---- kills at random points

RANKS = 5


def survives(me: Me) -> None:
    """Runs collectives, and shrinks when other ranks die, until no rank has died for some time."""
    comm = me.join()
    comm.barrier()
    me.say("ready")
    x, done = np.ones(3000), 0
    while done < 300:
        try:
            comm.all_reduce(x, "max")
            done += 1
            time.sleep(0.001)
        except PeerLostError:
            comm, done = comm.shrink(timeout_s=30), 0
    says(me, comm, "end")


def kill_at_random(seed: int) -> None:
    chance = random.Random(seed)
    victims = chance.sample(range(RANKS), chance.randrange(1, RANKS))
    with Processes(survives, RANKS) as ranks:
        ranks.wait_for("ready", range(RANKS))
        for victim in victims:
            # Depending on this delay, the next rank dies at once, during the shrink that excludes
            # the previous rank, or after that shrink.
            time.sleep(chance.choice([0, 0, 0.0005, 0.002, 0.005, 0.02, 0.1]) * chance.random())
            ranks.signal(victim, signal.SIGKILL)
        left = sorted(set(range(RANKS)) - set(victims))
        said = ranks.wait_for("end", left)
        assert [entry["former"] for entry in said] == [left] * len(left), seed
        assert [entry["rank"] for entry in said] == list(range(len(left)))


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_points(seed: int) -> None:
    kill_at_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_kills_at_random_points_fifty_times(seed: int) -> None:
    kill_at_random(seed)
