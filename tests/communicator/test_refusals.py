"""Wrong arguments. If one rank's arguments are wrong, the other ranks get an error. If all ranks'
arguments are wrong, the group stays usable.

The library promises errors within one second. The tests measure this but allow three seconds, for
busy machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Me, Processes, Threads
from time_limits import limit_s
from unisono import Communicator, MismatchError

MOST_S = 3.0


def _one_is_wrong(me: Me, right: Callable[[Communicator], Any], wrong: Any) -> None:
    world = me.join()
    world.barrier()
    me.say("ready")
    if me.rank == 2:
        time.sleep(0.3)  # meanwhile the other ranks wait in the call
    if me.rank == 1:
        time.sleep(0.2)
        me.attempt("raised", wrong, world)
    else:
        me.attempt("raised", right, world)
    me.attempt("again", world.barrier)
    me.wait_for_go()  # if this rank left the group now, the other ranks could get another error


def wrong_root(me: Me) -> None:
    _one_is_wrong(me, lambda w: w.broadcast(np.ones(3)), lambda w: w.broadcast(np.ones(3), 9))


def wrong_length(me: Me) -> None:
    _one_is_wrong(
        me,
        lambda w: w.all_gather(np.ones(3), np.ones(9)),
        lambda w: w.all_gather(np.ones(3), np.ones(8)),
    )


def wrong_type(me: Me) -> None:
    _one_is_wrong(me, lambda w: w.all_reduce(np.ones(3)), lambda w: w.all_reduce([1, 2, 3]))


def wrong_kind(me: Me) -> None:
    _one_is_wrong(me, lambda w: w.all_reduce(np.ones(3)), lambda w: w.all_reduce(None))


def wrong_kind_of_root(me: Me) -> None:
    _one_is_wrong(me, lambda w: w.broadcast(np.ones(3)), lambda w: w.broadcast(np.ones(3), "0"))


def wrong_algorithm(me: Me) -> None:
    def call(world: Communicator, algorithm: str | None) -> Any:
        return world.all_reduce(np.ones(3), algorithm=algorithm, async_op=True).wait()

    _one_is_wrong(me, lambda w: call(w, None), lambda w: call(w, "no_such"))


def wrong_counts(me: Me) -> None:
    _one_is_wrong(
        me, lambda w: w.all_gather_v(np.ones(2)), lambda w: w.all_gather_v(np.ones(2), [1, 1, 2])
    )


def wrong_in_a_batch(me: Me) -> None:
    def call(world: Communicator, root: int) -> None:
        with world.batch():
            world.all_reduce(np.ones(3))
            world.broadcast(np.ones(3), root)

    _one_is_wrong(me, lambda w: call(w, 0), lambda w: call(w, 3))


def wrong_async_op(me: Me) -> None:
    """Passes an async_op that is neither true nor false, in a call whose other arguments are
    prepared.
    """

    def call(world: Communicator, async_op: Any) -> None:
        data = np.ones(3)
        world.all_reduce(data)
        world.all_reduce(data, async_op=async_op)

    _one_is_wrong(me, lambda w: call(w, False), lambda w: call(w, np.arange(2)))


def wrong_behind_others(me: Me) -> None:
    """Makes the refused call after two asynchronous calls, which must still succeed."""

    def call(world: Communicator, algorithm: str | None) -> None:
        works = [world.all_reduce(np.ones(1 << 18), async_op=True) for _ in range(2)]
        try:
            world.all_reduce(np.ones(3), algorithm=algorithm)
        finally:
            for work in works:
                assert work.wait()[0] == 3

    _one_is_wrong(me, lambda w: call(w, None), lambda w: call(w, "no_such"))


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        (wrong_root, "ValueError", "broadcast: ValueError: root 9 is not one of the 3 ranks"),
        (wrong_length, "ValueError", "all_gather: ValueError: out has 8 elements"),
        (wrong_type, "TypeError", "all_reduce: TypeError: expected a NumPy array"),
        (wrong_kind, "TypeError", "all_reduce: TypeError: expected a NumPy array"),
        (wrong_kind_of_root, "TypeError", "broadcast: TypeError: root: expected the number"),
        (wrong_algorithm, "UnsupportedError", "all_reduce: UnsupportedError: "),
        (wrong_counts, "ValueError", "all_gather_v: ValueError: x: expected"),
        (wrong_in_a_batch, "ValueError", "broadcast: ValueError: root 3 is not one of"),
        (wrong_async_op, "ValueError", "all_reduce: ValueError: The truth value"),
        (wrong_behind_others, "UnsupportedError", "all_reduce: UnsupportedError: "),
    ],
)
def test_the_others_get_the_rank_and_its_reason(
    body: Callable[[Me], None], error: str, says: str
) -> None:
    with Processes(body, 3) as ranks:
        ranks.wait_for("ready", range(3))
        raised = ranks.wait_for("raised", range(3))
        assert raised[1]["error"] == error
        for rank in (0, 2):
            assert raised[rank]["error"] == "MismatchError"
            assert f"rank 1 refused {says}" in raised[rank]["text"]
        later = max(raised[rank]["at"] for rank in (0, 2)) - raised[1]["at"]
        print(f"{body.__name__}: raised {later:.3f} s after the refusal")
        assert later < limit_s(MOST_S)
        for entry in ranks.wait_for("again", range(3)):
            assert entry["error"] == "MismatchError"
        ranks.go(*range(3))


def test_ranks_that_all_refuse_stay_in_step() -> None:
    def check(comm: Communicator) -> None:
        x, total = np.ones(4), np.full(4, 2.0)
        for i in range(300):  # more calls than the history of calls stores
            with pytest.raises(ValueError, match="root"):
                comm.broadcast(x, root=2 + i)
            with pytest.raises(TypeError):
                comm.all_reduce([i])
            if i % 100 == 0:
                assert (comm.all_reduce(x.copy()) == total).all()
                works = [comm.all_reduce(x.copy(), async_op=True) for _ in range(3)]
                with pytest.raises(ValueError, match="expected a multiple"):
                    comm.all_to_all(np.ones(3), async_op=True)
                assert all((work.wait() == total).all() for work in works)
        with comm.batch():
            comm.all_reduce(x)
            with pytest.raises(ValueError, match="root"):
                comm.broadcast(x, root=7)
        assert (x == total).all()

    with Threads(2) as world:
        world.run(check)


def test_reasons_may_differ_and_programs_may_refuse_too() -> None:
    def check(comm: Communicator) -> None:
        if comm.rank:
            comm.refuse("my_step", ValueError("no data left"))
        else:
            with pytest.raises(ValueError, match="root"):
                comm.reduce(np.ones(2), root=5)
        assert comm.all_reduce(np.ones(1)).tolist() == [2]

    with Threads(2) as world:
        world.run(check)


def test_an_error_is_reported_once_and_long_reasons_are_cut() -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.barrier()
            return
        error = ValueError("ä" * 1000)
        comm.refuse("step", error)
        comm.refuse("step", error)
        comm.barrier()

    with Threads(2) as world:
        for outcome in world.outcomes(check):
            assert isinstance(outcome, MismatchError)
            assert "rank 1 refused step: ValueError: ää" in str(outcome)
            assert "rank 0 called barrier()" in str(outcome)
