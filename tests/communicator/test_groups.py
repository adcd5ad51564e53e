"""Communicators of a part of the ranks, and many such communicators at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import unisono
from pretended_hosts import spanning
from ranks import Threads, unique_name
from unisono import AbortedError, Communicator, MismatchError, RendezvousError, UnisonoError
from unisono.communicator import groups

World = Callable[[int], Threads]


def members(comm: Communicator, parent: Communicator) -> list[int]:
    """Returns the parent's rank of each member of `comm`, in the order of the ranks in `comm`."""
    return [int(rank) for rank in comm.all_gather(np.array([parent.rank]))]


def test_split_by_color_and_key(threads: World) -> None:
    def check(comm: Communicator) -> None:
        me = comm.rank
        cases: list[tuple[int | None, int, list[int]]] = [
            (me % 2, 0, [r for r in range(7) if r % 2 == me % 2]),
            (me % 3, -me, [r for r in range(6, -1, -1) if r % 3 == me % 3]),
            (-5, (me * 3) % 7, [0, 5, 3, 1, 6, 4, 2]),
            (me, 0, [me]),
            (2**62 if me < 3 else -(2**62), 1, [0, 1, 2] if me < 3 else [3, 4, 5, 6]),
        ]
        for color, key, expected in cases:
            child = comm.split(color, key)
            assert child is not None
            assert members(child, comm) == expected
            assert expected[child.rank] == me
            assert child.size == len(expected)
            assert child.hosts == (tuple(range(len(expected))),)
            child.close()
        child = comm.split(None if me in (0, 4) else 1, me)
        if me in (0, 4):
            assert child is None
        else:
            assert child is not None
            assert members(child, comm) == [1, 2, 3, 5, 6]
            assert child.all_reduce(np.ones(3)).tolist() == [5] * 3

    threads(7).run(check)


def test_groups_may_have_any_order(threads: World) -> None:
    def check(comm: Communicator) -> None:
        me = comm.rank
        for ranks in ([4, 0, 2], [2, 0, 4], [3], [1, 3], [4, 3, 2, 1, 0], [4, 0, 2]):
            child = comm.group(ranks)  # ranks that are not in the list get None
            if me not in ranks:
                assert child is None
                continue
            assert child is not None
            assert members(child, comm) == ranks
            x = np.full(5, me)
            child.broadcast(x, root=len(ranks) - 1)
            assert (x == ranks[-1]).all()
            child.close()
        for wrong in ([0, 0], [5], [-1]):
            with pytest.raises(ValueError, match="distinct ranks"):
                comm.group(wrong)

    threads(5).run(check)


def test_groups_of_groups(threads: World) -> None:
    def check(comm: Communicator) -> None:
        half = comm.split(comm.rank // 4)
        assert half is not None
        quarter = half.split(half.rank % 2)
        assert quarter is not None
        pair = quarter.group([1, 0])
        assert pair is not None
        base = comm.rank // 4 * 4 + comm.rank % 2
        assert members(pair, comm) == [base + 2, base]
        for child in (pair, quarter, half):
            assert child.all_reduce(np.ones(1)).tolist() == [child.size]

    threads(8).run(check)


def test_many_communicators_work_at_once(threads: World) -> None:
    def check(comm: Communicator) -> None:
        children = [comm.split(0, comm.rank * (-1) ** i) for i in range(12)]
        works = []
        for step, child in enumerate(children):
            assert child is not None
            works.append(child.all_reduce(np.full(50 + step, step), async_op=True))
        for child in reversed(children):  # in the reverse order of the asynchronous calls
            assert child is not None
            assert child.all_reduce(np.ones(2)).tolist() == [3, 3]
        for step, work in enumerate(works):
            assert work.wait().tolist() == [3 * step] * (50 + step)
        comm.barrier()

    threads(3).run(check)


def test_threads_may_use_different_groups(threads: World) -> None:
    def check(comm: Communicator) -> None:
        def work(child: Communicator) -> None:
            for _ in range(20):
                x = np.ones(2000)
                child.all_reduce(x)
                sums.append(float(x.sum()))

        children = [comm.group([0, 1]) for _ in range(3)]
        beside = [threading.Thread(target=work, args=(child,)) for child in children]
        for thread in beside:
            thread.start()
        for thread in beside:
            thread.join(60)

    sums: list[float] = []
    threads(2).run(check)
    assert sums == [4000.0] * 2 * 3 * 20


def test_a_failed_group_does_not_disturb_its_parent(threads: World) -> None:
    def check(comm: Communicator) -> None:
        child = comm.split(0)
        assert child is not None
        with pytest.raises(MismatchError):
            child.all_reduce(np.ones(2 + comm.rank))
        with pytest.raises(MismatchError):
            child.barrier()
        assert comm.all_reduce(np.ones(1)).tolist() == [3]
        again = comm.split(0)
        assert again is not None
        assert again.all_reduce(np.ones(1)).tolist() == [3]
        again.close()
        with pytest.raises(AbortedError, match="closed"):
            again.barrier()

    threads(3).run(check)


def test_a_timeout_can_be_set_and_is_inherited(threads: World) -> None:
    def check(comm: Communicator) -> None:
        child = comm.split(0)
        assert child is not None
        assert child.timeout_s == comm.timeout_s
        child.timeout_s = 12.5
        again = child.split(0)
        assert again is not None
        assert again.timeout_s == 12.5
        assert repr(again) == f"Communicator(rank={comm.rank}, size=2)"

    threads(2).run(check)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda comm: comm.split(1.5), "color: expected a whole number, not 1.5"),
        (lambda comm: comm.split(0, "1"), "key: expected a whole number, not '1'"),
        (lambda comm: comm.group([0.5, 1]), "a rank: expected a whole number, not 0.5"),
        (lambda comm: comm.group("01"), "a rank: expected a whole number, not '0'"),
        (lambda comm: comm.shrink(["1"]), "exclude: expected a whole number, not '1'"),
        (lambda comm: setattr(comm, "timeout_s", "5"), "timeout_s: expected seconds, not '5'"),
    ],
)
def test_arguments_that_are_no_integers_are_refused(
    call: Callable[[Communicator], Any], text: str, threads: World
) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(TypeError, match=text):
            call(comm)
        assert comm.all_reduce(np.ones(1)).tolist() == [2]

    threads(2).run(check)


def test_a_color_of_too_many_bits_is_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="color: expected a number of 64 bits"):
            comm.split(1 << 70)
        assert comm.all_reduce(np.ones(1)).tolist() == [2]

    threads(2).run(check)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"rank": "0"}, "rank: expected a whole number, not '0'"),
        ({"size": 1.0}, "size: expected a whole number, not 1.0"),
        ({"rendezvous": 5}, "rendezvous: expected a text, not 5"),
        ({"timeout_s": "5"}, "timeout_s: expected seconds, not '5'"),
        ({"reproducible": "no"}, "reproducible: expected True or False, not 'no'"),
    ],
)
def test_wrong_arguments_of_init_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        unisono.init(**{"rank": 0, "size": 1, "rendezvous": "of a wrong kind", **wrong})


def test_a_group_of_one_rank_works(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.arange(5.0)
        for call in (comm.all_reduce, comm.reduce, comm.broadcast, comm.all_gather, comm.gather):
            assert call(x).tolist() == [0, 1, 2, 3, 4]
        assert comm.reduce_scatter(x).tolist() == comm.all_to_all(x).tolist() == x.tolist()
        assert comm.scatter(x).tolist() == x.tolist()
        assert comm.all_reduce(x, "avg", async_op=True).wait() is x
        child = comm.split(3)
        assert child is not None
        child.barrier()

    threads(1).run(check)


CLOSED: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda c: c.all_reduce(np.ones(2)),
    "barrier": lambda c: c.barrier(),
    "all_gather_v": lambda c: c.all_gather_v(np.ones(2)),
    "send": lambda c: c.send(np.ones(2), 0),
    "recv": lambda c: c.recv(np.ones(2), 0),
    "an exchange with nobody": lambda c: c.neighbor_exchange([], [], out=[]),
    "batch": lambda c: c.batch(),
    "split": lambda c: c.split(0),
    "split without a color": lambda c: c.split(None),
    "group": lambda c: c.group([0]),
    "group of others": lambda c: c.group([]),
    "shrink": lambda c: c.shrink(),
    "explain": lambda c: c.explain("all_reduce", 8),
    "with": lambda c: c.__enter__(),
}


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_communicator_refuses_calls(name: str) -> None:
    comm = unisono.init(rank=0, size=1, rendezvous=unique_name())
    comm.close()
    with pytest.raises(AbortedError, match=r"^this communicator is closed$"):
        CLOSED[name](comm)


def test_a_mismatch_names_split() -> None:
    with Threads(2) as world:
        call = lambda c: c.split(0) if c.rank == 0 else c.barrier()  # noqa: E731
        for error in world.outcomes(call):
            assert isinstance(error, MismatchError)
            assert "rank 0 called split(), rank 1 called barrier()" in str(error)


def test_ranks_that_wait_in_vain_get_the_name_of_their_call() -> None:
    with Threads(2, timeout_s=0.5) as world:
        zero, one = world.outcomes(lambda c: c.group([c.rank, 1 - c.rank]))
    assert isinstance(zero, RendezvousError)
    assert str(zero).startswith("group([0, 1]): ")
    assert isinstance(one, RendezvousError)
    assert str(one).startswith("group([1, 0]): ")
    assert "must call it with the same list" in str(one)


def test_a_group_over_hosts_has_its_parents_timeout() -> None:
    def form(comm: Communicator) -> None:
        comm.timeout_s = 0.5
        comm.group([comm.rank, 1 - comm.rank])

    for error in spanning(form, [{}] * 2, timeout_s=20):
        assert isinstance(error, UnisonoError)
        assert ": timeout after 0.5 s" in str(error)


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize(("end", "text"), [("close", "ranks [2] have left"), ("abort", "no more")])
def test_forming_a_group_fails_if_a_rank_cannot_come(hosts: int, end: str, text: str) -> None:
    def form(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank < 2:
            comm.group([0, 1, 2])
        elif end == "close":
            comm.close()
        else:
            comm.abort("no more")

    if hosts == 1:
        with Threads(3, timeout_s=20) as world:
            outcomes = world.outcomes(form)
    else:
        outcomes = spanning(form, [{}] * 3, timeout_s=20)
    assert outcomes[2] is None
    for error in outcomes[:2]:
        assert isinstance(error, UnisonoError)
        assert text in str(error)


def test_a_rank_may_leave_the_parent_of_a_formed_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets rank 0 leave the parent after a group is formed. A rank on another host that still forms
    the group must not report a failure.

    Rank 1 is delayed while it checks for ranks that have left. Meanwhile rank 0 forms the group and
    leaves the parent as early as possible.
    """
    look = groups._require_all
    looks, left = threading.Event(), threading.Event()

    def held(parent: Communicator, ranks: Sequence[int]) -> None:
        if parent.rank == 1:
            looks.set()
            left.wait(0.5)
        look(parent, ranks)

    def form(comm: Communicator) -> float:
        assert comm.rank == 1 or looks.wait(20)
        child = comm.group([0, 1])
        assert child is not None
        comm.close()
        if comm.rank == 0:
            left.set()
        with child:
            return float(child.all_reduce(np.ones(1))[0])

    monkeypatch.setattr(groups, "_require_all", held)
    assert spanning(form, [{}] * 2, timeout_s=20) == [2, 2]
