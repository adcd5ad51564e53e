"""When ranks die, stop, disagree or leave, every other rank gets an error that names these ranks.

Ranks are processes here, since only a process can be killed. The library promises errors within one
second. The tests print the measured time but allow three seconds, for busy machines.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Me, Processes, Threads
from time_limits import limit_s
from unisono import CollectiveTimeoutError, Communicator, MismatchError, PeerLostError

MOST_S = 3.0
SETTLE_S = 0.3


def check_times(since: float, said: list[dict[str, Any]], what: str) -> None:
    """Prints the time from `since` to each rank's error, and checks that all times are below the
    limit.
    """
    times = [entry["at"] - since for entry in said]
    print(f"{what}: raised after {', '.join(f'{t:.3f}' for t in times)} s")
    assert max(times) < limit_s(MOST_S)


# ---- a rank is killed


def _survive(me: Me, victim: Callable[[Communicator], Any]) -> None:
    """Runs a rank whose peers fail. Each survivor shares a group with only the failing rank, so
    that no other rank can report the death first.
    """
    world = me.join()
    pairs = [world.group([survivor, 4]) for survivor in range(4)]
    if me.rank == 4:
        me.say("ready")
        victim(world)
        time.sleep(60)
    pair = pairs[me.rank]
    assert pair is not None
    work = pair.all_reduce(np.ones(3), async_op=True) if me.rank == 2 else None
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    me.say("ready")
    if me.rank == 0:
        me.attempt("raised", pair.all_reduce, np.ones(3))
    elif me.rank == 1:
        me.attempt("raised", pair.recv, np.ones(3), 1)
    elif work is not None:
        me.attempt("raised", work.wait)
    else:
        signal.sigwait([signal.SIGUSR1])
        me.say("calls")
        me.attempt("raised", pair.barrier)
    me.attempt("again", pair.all_gather, np.ones(3))


def killed_in_python(me: Me) -> None:
    _survive(me, lambda world: time.sleep(60))


def killed_in_a_collective(me: Me) -> None:
    _survive(me, lambda world: world.all_reduce(np.ones(100)))


def killed_in_recv(me: Me) -> None:
    _survive(me, lambda world: world.recv(np.ones(100)))


@pytest.mark.parametrize("body", [killed_in_python, killed_in_a_collective, killed_in_recv])
def test_every_survivor_names_the_killed_rank(body: Callable[[Me], None]) -> None:
    with Processes(body, 5) as ranks:
        ranks.wait_for("ready", range(5))
        time.sleep(SETTLE_S)
        pid = ranks.processes[4].pid
        killed = ranks.signal(4, signal.SIGKILL)
        raised = ranks.wait_for("raised", [0, 1, 2])
        ranks.signal(3, signal.SIGUSR1)
        raised += ranks.wait_for("raised", [3])
        check_times(killed, raised[:3], body.__name__)
        check_times(
            ranks.wait_for("calls", [3])[0]["at"], raised[3:], f"{body.__name__}, calling later"
        )
        again = ranks.wait_for("again", range(4))
        for entry in raised + again:
            assert entry["error"] == "PeerLostError"
            # the failing rank 4 of the world is rank 1 of the pair
            assert entry["text"] == f"rank 1 (pid {pid}) is gone"
        assert ranks.exit_codes() == [0, 0, 0, 0, -signal.SIGKILL]


def flooded(me: Me) -> None:
    world = me.join()
    world.barrier()
    me.say("ready")
    if me.rank == 0:
        return me.attempt("raised", world.recv, np.ones(3), 2)
    if me.rank == 2:
        time.sleep(60)
    with contextlib.suppress(PeerLostError):
        while True:
            world.send(np.ones(1), 0, tag=5)
            time.sleep(0.005)


def test_a_death_is_detected_during_other_traffic() -> None:
    with Processes(flooded, 3) as ranks:
        ranks.wait_for("ready", range(3))
        time.sleep(SETTLE_S)
        killed = ranks.signal(2, signal.SIGKILL)
        raised = ranks.wait_for("raised", [0])
        check_times(killed, raised, "flooded")
        assert raised[0]["error"] == "PeerLostError"
        assert raised[0]["text"].startswith("rank 2 (pid ")


# ---- a rank is late


def stopped(me: Me) -> None:
    world = me.join(timeout_s=60)  # more than the limit of the test
    x = np.zeros(7, np.int32)
    world.broadcast(x, root=1)
    me.say("ready")
    if me.rank == 2:
        me.stop()
    elif me.rank == 0:
        me.wait_for_go()
        world.timeout_s = 1.0
    started = time.monotonic()
    me.attempt("raised", world.all_reduce, np.ones(5))
    me.say("waited", seconds=time.monotonic() - started)


def test_a_stopped_rank_is_named_with_its_last_call() -> None:
    with Processes(stopped, 3) as ranks:
        ranks.wait_for("ready", range(3))
        ranks.wait_for_stop(2)
        time.sleep(SETTLE_S)  # rank 1, which has a longer timeout, arrives before rank 0
        ranks.go(0)
        for entry in ranks.wait_for("raised", [0, 1]):
            assert entry["error"] == "CollectiveTimeoutError"
            assert re.search(
                r"call #2 all_reduce\(sum, float64\[5\]\): timeout after 1 s on rank 0: "
                r"rank 2 has not arrived, its last call was broadcast\(int32\[7\], root=1\)$",
                entry["text"],
            )
        for entry in ranks.wait_for("waited", [0]):
            assert 0.9 < entry["seconds"] < limit_s(1.0 + MOST_S)


def elsewhere(me: Me) -> None:
    world = me.join(timeout_s=20)
    world.timeout_s = 1.0 if me.rank == 0 else 20
    me.say("ready")
    if me.rank == 0:
        me.wait_for_go()
        me.attempt("raised", world.all_reduce, np.ones(5))
    else:
        me.attempt("raised", world.recv, np.ones(5), 0)


def test_a_rank_that_waits_for_a_message_is_named_with_the_message() -> None:
    with Processes(elsewhere, 2) as ranks:
        ranks.wait_for("ready", [0, 1])
        time.sleep(SETTLE_S)  # rank 1 waits for the message
        ranks.go(0)
        raised = ranks.wait_for("raised", [0, 1])[0]
        assert raised["error"] == "CollectiveTimeoutError"
        assert raised["text"].endswith("and it waits in recv from rank 0")


def test_a_late_message_names_its_senders_last_call() -> None:
    def receive(comm: Communicator) -> str:
        if comm.rank == 0:
            comm.broadcast(np.zeros(7, np.int32))
            return ""
        comm.broadcast(np.zeros(7, np.int32))
        comm.timeout_s = 0.3
        with pytest.raises(CollectiveTimeoutError) as raised:
            comm.recv(np.ones(1), 0)
        return str(raised.value)

    text = Threads(2).run(receive)[1]
    assert text.endswith("nothing was sent; rank 0: its last call was broadcast(int32[7], root=0)")


# ---- ranks disagree


def broadcasts(comm: Communicator) -> None:
    """Runs many broadcasts. The root runs ahead and compares its calls with the other ranks only
    rarely.
    """
    for number in range(500):
        comm.broadcast(np.ones(4 if comm.rank == 2 and number == 150 else 3))


MISMATCHES: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "operation": (
        lambda c: c.barrier() if c.rank == 1 else c.all_reduce(np.ones(3)),
        r"rank 0 called all_reduce\(sum, float64\[3\]\), rank 1 called barrier\(\), rank 2 called",
    ),
    "shape": (
        lambda c: c.all_reduce(np.ones(3 + c.rank // 2)),
        r"rank 1 called all_reduce\(sum, float64\[3\]\), rank 2 called .*float64\[4\]\)",
    ),
    "type": (
        lambda c: c.all_reduce(np.ones(3, np.float32 if c.rank else np.float64)),
        r"rank 0 called all_reduce\(sum, float64\[3\]\), rank 1 called .*float32\[3\]",
    ),
    "reduction": (
        lambda c: c.all_reduce(np.ones(3), "max" if c.rank == 2 else "sum"),
        r"rank 1 called all_reduce\(sum, .*rank 2 called all_reduce\(max, ",
    ),
    "root": (
        lambda c: c.broadcast(np.ones(3), root=c.rank // 2),
        r"rank 1 called broadcast\(float64\[3\], root=0\), rank 2 called .*root=1\)",
    ),
    "in a loop": (
        broadcasts,
        r"rank [01] called broadcast\(float64\[3\], root=0\).*rank 2 called .*float64\[4\]",
    ),
    "asynchronous": (
        lambda c: c.all_gather(np.ones(3 + c.rank), async_op=True).wait(),
        r"rank 0 called all_gather\(float64\[9\]\), rank 1 called all_gather\(float64\[12\]\)",
    ),
    "one of them asynchronous": (
        lambda c: (
            c.all_gather(np.ones(3), async_op=True).wait() if c.rank else c.all_gather(np.ones(2))
        ),
        r"rank 0 called all_gather\(float64\[6\]\), rank 1 called all_gather\(float64\[9\]\)",
    ),
    "lengths of pieces": (
        lambda c: c.reduce_scatter([np.ones(1 + (c.rank == 2)), np.ones(2), np.ones(3)]),
        r"rank 0 called reduce_scatter\(sum, float64\[6\]\).*rank 2 called .*float64\[7\]",
    ),
    "no length": (
        lambda c: c.broadcast(np.ones(0 if c.rank else 1)),
        r"rank 0 called broadcast\(float64\[1\], root=0\).*rank [12] called .*float64\[0\]",
    ),
    "many blocks": (
        lambda c: c.all_reduce(np.ones(2_000_000 - (c.rank == 1), np.uint8)),
        r"rank 0 called all_reduce\(sum, uint8\[2000000\]\), rank 1 called .*uint8\[1999999\]",
    ),
    "direction": (
        lambda c: c.scatter(np.ones(6), np.ones(2)) if c.rank == 0 else c.gather(np.ones(2)),
        r"rank 0 called scatter\(float64\[6\], root=0\).*rank [12] called gather\(float64\[6\]",
    ),
    "a rank late": (
        lambda c: (time.sleep(0.5 * c.rank), c.all_reduce(np.ones(1 + c.rank))),
        r"rank 0 called all_reduce\(sum, float64\[1\]\), rank 1 called .*float64\[2\]",
    ),
    "algorithm": (
        lambda c: c.all_reduce(np.ones(3), algorithm="ring" if c.rank else "direct"),
        r"rank 0 called all_reduce\(.*rank [12] called all_reduce\(",
    ),
}


def disagree(me: Me) -> None:
    world = me.join()
    for name, (call, _) in MISMATCHES.items():
        group = world.group([0, 1, 2])
        assert group is not None
        world.barrier()
        me.say(f"calls {name}")
        me.attempt(name, call, group)
        me.attempt(f"{name} again", group.barrier)


@pytest.fixture(scope="module")
def disagreement() -> Any:
    with Processes(disagree, 3) as ranks:
        yield ranks


@pytest.mark.parametrize("name", MISMATCHES)
def test_all_ranks_get_the_calls_of_all_ranks(name: str, disagreement: Processes) -> None:
    calls = disagreement.wait_for(f"calls {name}", range(3))
    raised = disagreement.wait_for(name, range(3))
    again = disagreement.wait_for(f"{name} again", range(3))
    late_s = 0.5 if name == "a rank late" else 0
    check_times(max(entry["at"] for entry in calls) + late_s, raised, name)
    for entry in raised + again:
        assert entry["error"] == "MismatchError", entry
        assert re.search(MISMATCHES[name][1], entry["text"]), entry["text"]


def test_types_are_compared_even_if_both_sum_in_float32() -> None:
    def check(comm: Communicator) -> None:
        x = np.ones(3, np.float32 if comm.rank else np.float16)
        with pytest.raises(MismatchError, match=r"float16\[3\].*float32\[3\]"):
            comm.all_reduce(x, algorithm="ring")

    with Threads(3) as world:
        assert world.outcomes(check) == [None] * 3


def test_errors_of_many_ranks_stay_short() -> None:
    with Threads(16) as world:
        outcomes = world.outcomes(lambda comm: comm.all_reduce(np.ones(3 + (comm.rank == 7))))
    assert all(isinstance(outcome, MismatchError) for outcome in outcomes)
    assert "rank 7 called all_reduce(sum, float64[4])" in str(outcomes[0])


# ---- a rank leaves


def leaves(me: Me) -> None:
    world = me.join()
    world.all_gather(np.ones(2, np.int8))
    me.say("ready")
    if me.rank == 1:
        time.sleep(SETTLE_S)
        me.say("leaves")
        raise RuntimeError("this rank has had enough")
    if me.rank == 0:
        me.attempt("raised", world.all_reduce, np.ones(3))
    else:
        me.attempt("raised", world.all_reduce(np.ones(3), async_op=True).wait)


LEFT = (
    r"rank 1 left the group before call #2 all_reduce\(sum, float64\[3\]\); "
    r"its last call was all_gather\(int8\[6\]\)$"
)


def test_a_rank_that_raises_and_ends_is_named() -> None:
    with Processes(leaves, 3) as ranks:
        raised = ranks.wait_for("raised", [0, 2])
        check_times(ranks.wait_for("leaves", [1])[0]["at"], raised, "leaves")
        for entry in raised:
            assert entry["error"] == "PeerLostError"
            assert re.match(LEFT, entry["text"])
        assert ranks.exit_codes() == [0, 1, 0]


def test_a_rank_that_closes_early_is_named() -> None:
    def check(comm: Communicator) -> None:
        comm.all_gather(np.ones(2, np.int8))
        if comm.rank == 1:
            return comm.close()
        with pytest.raises(PeerLostError, match=LEFT):
            comm.all_reduce(np.ones(3))
        return None

    with Threads(3) as world:
        assert world.outcomes(check) == [None] * 3


def test_a_rank_may_leave_after_the_last_call() -> None:
    def check(comm: Communicator) -> None:
        for step in range(40):
            group = comm.group(range(comm.size))
            assert group is not None
            x = np.ones(1 + 997 * (step % 5))
            for algorithm in (None, "ring"):
                group.all_reduce(x, algorithm=algorithm)
            if comm.rank:
                group.send(x, 0)
            else:
                for _ in range(1, comm.size):
                    group.recv(x)
            group.close()

    with Threads(3) as world:
        world.run(check)
