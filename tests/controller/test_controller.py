"""The controller on real ranks: tensors in any order, fusion, frozen plans, and errors after which
the controller stays usable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Threads
from unisono import AbortedError, Communicator, MismatchError, PeerLostError
from unisono.controller import Controller

World = Callable[[int], Threads]

NAMES = [f"tensor {i}" for i in range(40)]


def _order(rank: int, step: int, names: list[str] = NAMES) -> list[str]:
    rng = np.random.default_rng([rank, step])
    return [names[i] for i in rng.permutation(len(names))]


def _value(name: str, rank: int, step: int) -> float:
    return float(NAMES.index(name) + 100 * rank + step)


def _step(controller: Controller, step: int, names: list[str] = NAMES) -> None:
    """Runs one step of a program, with tensors of several lengths in an order that differs between
    ranks.
    """
    arrays = {
        name: np.full(1 + NAMES.index(name) * 3, _value(name, controller.rank, step))
        for name in names
    }
    order = _order(controller.rank, step, names)
    handles = {name: controller.all_reduce(name, arrays[name]) for name in order}
    for name in _order(controller.rank, step + 1000, names):
        result = handles[name].wait()
        assert result is arrays[name]
        expected = sum(_value(name, rank, step) for rank in range(controller.size))
        assert (result == expected).all(), (name, step)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_tensors_run_in_any_order(ranks: int, threads: World) -> None:
    def check(comm: Communicator) -> Any:
        with Controller(comm) as controller:
            for step in range(8):
                _step(controller, step)
            return controller.stats()

    for stats in threads(ranks).run(check):
        assert stats.tensors_submitted == 8 * len(NAMES)
        assert stats.plan_changes == 1
        assert stats.cache_hits >= 4 * len(NAMES)
        assert stats.collectives_run < 4 * len(NAMES)


def test_a_changed_set_of_tensors_is_talked_about_and_frozen_again(threads: World) -> None:
    def check(comm: Communicator) -> Any:
        with Controller(comm) as controller:
            for step in range(6):
                _step(controller, step)
            for step in range(6, 16):
                _step(controller, step, NAMES[5:])
            for step in range(16, 40):
                _step(controller, step)
            return controller.stats()

    for stats in threads(3).run(check):
        assert stats.plan_changes >= 5  # the plan is frozen three times and left twice


def test_a_tensor_beside_the_plan_is_talked_about(threads: World) -> None:
    def check(comm: Communicator) -> Any:
        with Controller(comm) as controller:
            for step in range(12):
                _step(controller, step)
                if step in (7, 10):
                    assert controller.all_reduce("loss", np.ones(1)).wait() == comm.size
            return controller.stats()

    for stats in threads(2).run(check):
        assert stats.plan_changes == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
def test_types_and_layouts_of_all_kinds(dtype: str, threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm, fusion_bytes=1000) as controller:
            for step in range(5):
                strided = np.full((6, 4), comm.rank + step, dtype)[::2, ::2]
                empty = np.zeros(0, dtype)
                large = np.full(2000, comm.rank, dtype)
                scalar = np.full((), 3, dtype)
                handles = [
                    controller.all_reduce("strided", strided),
                    controller.all_reduce("empty", empty),
                    controller.all_reduce("large", large, "max"),
                    controller.all_reduce("scalar", scalar, "avg"),
                ]
                for handle in handles[:: 1 - 2 * (comm.rank % 2)]:
                    handle.wait()
                assert (strided == sum(r + step for r in range(comm.size))).all()
                assert (large == comm.size - 1).all()
                assert scalar == 3

    threads(3).run(check)


def test_every_operation_also_in_a_frozen_plan(threads: World) -> None:
    def check(comm: Communicator) -> Any:
        n = comm.size
        with Controller(comm) as controller:
            for step in range(6):
                rows = np.full((comm.rank + 1, 2), comm.rank)
                uneven = controller.all_gather("uneven", rows)
                even = controller.all_gather("even", np.array([comm.rank, step]))
                copied = controller.broadcast("copied", np.full(3, comm.rank), root=n - 1)
                share = controller.reduce_scatter("share", np.arange(n * 2.0))
                shares = controller.all_to_all("shares", np.full(n, comm.rank))
                assert uneven.wait().tolist() == [[r, r] for r in range(n) for _ in range(r + 1)]
                assert even.wait().tolist() == [v for r in range(n) for v in (r, step)]
                assert copied.wait().tolist() == [n - 1] * 3
                assert (share.wait() == n * (comm.rank * 2 + np.arange(2.0))).all()
                assert shares.wait().tolist() == list(range(n))
            return controller.stats()

    for stats in threads(3).run(check):
        assert stats.cache_hits > 0


@pytest.mark.parametrize("steps", [0, 6])
def test_a_mismatch_fails_the_tensor_on_all_ranks_and_nothing_else(
    steps: int, threads: World
) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm) as controller:
            for step in range(steps):
                _step(controller, step)
            name = NAMES[3]
            wrong = controller.all_reduce(name, np.zeros(3 if comm.rank == 1 else 2))
            with pytest.raises(MismatchError, match=r"shape: \(2,\) on ranks 0 and 2, \(3,\) on"):
                wrong.wait()
            assert isinstance(wrong.exception, MismatchError)
            _step(controller, 50)
            op = "max" if comm.rank == 2 else "sum"
            with pytest.raises(MismatchError, match="op: sum on ranks 0 and 1, max on rank 2"):
                controller.all_reduce(name, np.zeros(2), op).wait()
            kind = np.float32 if comm.rank == 0 else np.float64
            with pytest.raises(MismatchError, match="dtype: float32 on rank 0, float64 on"):
                controller.all_reduce(name, np.zeros(2, kind)).wait()
            _step(controller, 51)

    threads(3).run(check)


def test_a_name_submitted_again_too_early_is_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm) as controller:
            first = controller.all_reduce("w", np.ones(2))
            if comm.rank == 0:
                with pytest.raises(ValueError, match="'w' was submitted again before"):
                    controller.all_reduce("w", np.ones(2))
            comm.barrier()
            controller.all_reduce("v", np.ones(1)).wait()
            assert first.wait().tolist() == [2, 2]

    world = threads(2)

    # Rank 1 submits only after rank 0's second submission was refused.
    def check_late(comm: Communicator) -> None:
        with Controller(comm) as controller:
            if comm.rank == 0:
                first = controller.all_reduce("w", np.ones(2))
                with pytest.raises(ValueError, match="'w' was submitted again before"):
                    controller.all_reduce("w", np.ones(2))
                comm.barrier()
            else:
                comm.barrier()
                first = controller.all_reduce("w", np.ones(2))
            assert first.wait().tolist() == [2, 2]

    world.run(check_late)


def test_a_program_may_wait_in_the_middle_of_its_step(threads: World) -> None:
    def check(comm: Communicator) -> Any:
        with Controller(comm) as controller:
            for _ in range(40):
                a = np.ones(2)
                controller.all_reduce("a", a).wait()
                b, c = a * 2, a * 3
                handles = [controller.all_reduce("b", b), controller.all_reduce("c", c)]
                for handle in handles:
                    handle.wait()
                assert (b == 2 * comm.size**2).all()
                assert (c == 3 * comm.size**2).all()
            return controller.stats()

    for stats in threads(2).run(check):
        assert stats.cache_hits > 20  # the plan contains the order: b follows a


def test_ranks_that_depend_in_different_ways_do_not_hang(threads: World) -> None:
    """Lets rank 1 wait for tensor "a" before it submits "b", while the other ranks submit both
    tensors first. Rank 1 begins with this after the plan is frozen. Every step must still end with
    the right sums.
    """

    def check(comm: Communicator) -> None:
        with Controller(comm) as controller:
            for step in range(30):
                a, b = np.ones(2), np.ones(2)
                if comm.rank == 1 and step >= 6:
                    controller.all_reduce("a", a).wait()
                    controller.all_reduce("b", b).wait()
                else:
                    handles = [controller.all_reduce("a", a), controller.all_reduce("b", b)]
                    for handle in handles:
                        handle.wait()
                assert (a == comm.size).all()
                assert (b == comm.size).all()

    threads(3).run(check)


def test_two_controllers_in_opposite_orders(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm) as one, Controller(comm) as two:
            for _ in range(6):
                pair = [(one, "x"), (two, "x")][:: 1 - 2 * (comm.rank % 2)]
                handles = [controller.all_reduce(name, np.ones(3)) for controller, name in pair]
                for handle in handles:
                    assert (handle.wait() == comm.size).all()

    threads(2).run(check)


def test_a_rank_joins_early(threads: World) -> None:
    def check(comm: Communicator) -> list[float]:
        found = []
        with Controller(comm) as controller:
            steps = 6 if comm.rank == 0 else 9
            for _ in range(steps):
                mean = controller.all_reduce("w", np.full(2, 6.0), "avg").wait()
                total = controller.all_reduce("v", np.ones(1)).wait()
                found.append((float(mean[0]), float(total[0])))
            assert controller.join() in range(comm.size)
            _step(controller, 3)  # all ranks are active again
        return found

    results = threads(3).run(check)
    assert results[0] == [(6.0, 3.0)] * 6
    assert results[1] == results[2] == [(6.0, 3.0)] * 6 + [(6.0, 2.0)] * 3


def test_averages_may_count_the_ranks_that_joined(threads: World) -> None:
    def check(comm: Communicator) -> float:
        with Controller(comm) as controller:
            if comm.rank == 0:
                controller.join(average_over="all")
                return 0.0
            mean = controller.all_reduce("w", np.full(1, 6.0), "avg").wait()
            gathered = controller.all_gather("g", np.full(2, comm.rank)).wait()
            assert gathered.tolist() == [1, 1]
            controller.join()
            return float(mean[0])

    assert threads(2).run(check) == [0.0, 3.0]


def test_a_controller_that_closes_early_fails_the_others_tensors(threads: World) -> None:
    def check(comm: Communicator) -> None:
        controller = Controller(comm)
        if comm.rank == 1:
            controller.close()
            with pytest.raises(AbortedError, match="closed"):
                controller.all_reduce("w", np.ones(1))
            return
        with pytest.raises(PeerLostError, match="rank 1 has closed its controller"):
            controller.all_reduce("w", np.ones(1)).wait()
        controller.close()

    threads(2).run(check)


def test_a_loss_that_one_rank_finds_is_a_loss_on_all_ranks(threads: World) -> None:
    """Tests that other ranks get the error of the first rank that finds a loss, since they may not
    have found it themselves yet.
    """

    def check(comm: Communicator) -> None:
        with Controller(comm) as controller:
            pending = controller.all_reduce("w", np.ones(1)) if comm.rank != 1 else None
            comm.barrier()  # no rank submits after the failure, which the call would raise
            if comm.rank == 0:
                controller._loop.fail(PeerLostError("rank 1 (pid 7) is gone"))
            if pending is not None:
                with pytest.raises(PeerLostError, match=r"^rank 1 \(pid 7\) is gone$"):
                    pending.wait()
            comm.barrier()  # rank 1 must not close its controller before

    threads(3).run(check)


def test_an_error_of_the_program_is_told_to_the_others(threads: World) -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 1:
            with pytest.raises(ZeroDivisionError), Controller(comm):
                raise ZeroDivisionError("in the middle")
            return
        with Controller(comm) as controller, pytest.raises((AbortedError, PeerLostError)):
            controller.all_reduce("w", np.ones(1)).wait()

    threads(2).run(check)


def test_groups_travel_together(threads: World) -> None:
    def check(comm: Communicator) -> Any:
        with Controller(comm) as controller:
            controller.group(["a", "b"])
            a = controller.all_reduce("a", np.ones(2))
            if comm.rank == 0:
                assert not a.done
            b = controller.all_reduce("b", np.ones(2))
            a.wait()
            assert b.done
            return controller.stats().collectives_run

    assert threads(2).run(check) == [1, 1]


def test_threads_submit_at_once(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm) as controller:

            def part(first: int) -> None:
                for step in range(6):
                    _step(controller, step, NAMES[first : first + 10])

            workers = [threading.Thread(target=part, args=(k,)) for k in (0, 10, 20, 30)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(60)
                assert not worker.is_alive()

    threads(2).run(check)


def test_wrong_arguments_are_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="fusion_bytes"):
            Controller(comm, fusion_bytes=-1)
        with pytest.raises(ValueError, match="stall_warning_s"):
            Controller(comm, stall_warning_s=0)
        with Controller(comm) as controller:
            with pytest.raises(TypeError, match="array"):
                controller.all_reduce("w", [1.0])
            with pytest.raises(ValueError, match="average_over"):
                controller.join(average_over="some")

    threads(1).run(check)


def test_a_group_of_a_thousand_tensors_is_agreed_on(threads: World) -> None:
    names = [f"member {i}" for i in range(1000)]

    def check(comm: Communicator) -> Any:
        with Controller(comm) as controller:
            controller.group(names)
            for _ in range(4):
                handles = [controller.all_reduce(name, np.ones(1)) for name in names]
                assert all(handle.wait(30)[0] == comm.size for handle in handles)
            return controller.stats()

    for stats in threads(2).run(check):
        assert stats.collectives_run == 4
