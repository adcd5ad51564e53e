"""Submissions of tensors of the frozen plan: the native path, and the cases that it leaves to
Python.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ranks import Threads
from unisono import (
    CommunicationError,
    Communicator,
    MismatchError,
    PeerLostError,
    native,
    pairs,
)
from unisono.controller import Controller
from unisono.controller.frozen_plan import PlannedBucket, PlannedTensor
from unisono.controller.handle import Handle
from unisono.controller.request import Request
from unisono.types import DType

World = Callable[[int], Threads]


def _freeze(controller: Controller, names: list[str], length: int = 3) -> None:
    for _ in range(6):
        handles = [controller.all_reduce(name, np.ones(length)) for name in names]
        for handle in handles:
            handle.wait()
    assert controller._loop._planned.count > 0


def test_threads_of_a_rank_fill_the_buckets_of_a_plan_together(threads: World) -> None:
    names = [f"tensor {i}" for i in range(32)]

    def check(comm: Communicator) -> None:
        with Controller(comm, fusion_bytes=400) as controller:
            _freeze(controller, names, 9)
            before = controller.stats()

            def work(own: list[str], seed: int) -> None:
                order = np.random.default_rng([seed, comm.rank])
                try:
                    for step in range(60):
                        arrays = {name: np.full(9, step + comm.rank + 1.0) for name in own}
                        picked = [own[i] for i in order.permutation(len(own))]
                        handles = [controller.all_reduce(name, arrays[name]) for name in picked]
                        for name, handle in zip(picked, handles, strict=True):
                            handle.wait()
                            assert (arrays[name] == 2 * step + 3).all(), (name, step)
                except BaseException as error:
                    failures.append(error)

            failures: list[BaseException] = []
            workers = [
                threading.Thread(target=work, args=(names[i::4], i), daemon=True) for i in range(4)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(60)
            assert not failures, failures
            after = controller.stats()
            assert after.tensors_submitted - before.tensors_submitted == 60 * len(names)
            assert after.bytes - before.bytes == 60 * len(names) * 72

    threads(2).run(check)


@pytest.mark.parametrize(
    ("changed", "op"),
    [
        (np.ones((3, 1)), "sum"),
        (np.ones(3, np.float32), "sum"),
        (np.ones(3), "max"),
        (np.ones(4), "sum"),
    ],
)
def test_a_tensor_that_differs_leaves_the_plan(changed: Any, op: str, threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm, tune_fusion=False) as controller:
            _freeze(controller, ["a", "b"])
            before = controller.stats()
            array = changed.copy()
            controller.all_reduce("b", np.ones(3))
            controller.all_reduce("a", array, op).wait()
            assert (array == (comm.size if op == "sum" else 1)).all()
            after = controller.stats()
            assert after.plan_changes == before.plan_changes + 1
            assert after.cache_hits <= before.cache_hits + 1  # the plan may already hold "b"

    threads(2).run(check)


def test_a_tensor_that_differs_on_one_rank_is_refused_on_all(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm, tune_fusion=False) as controller:
            _freeze(controller, ["a"])
            with pytest.raises(MismatchError, match="shape"):
                controller.all_reduce("a", np.ones(3 + comm.rank)).wait()
            assert (controller.all_reduce("a", np.ones(3)).wait() == comm.size).all()

    threads(2).run(check)


def test_views_and_subclasses_take_the_plan_too(threads: World) -> None:
    class Named(np.ndarray):
        pass

    def check(comm: Communicator) -> None:
        with Controller(comm, tune_fusion=False) as controller:
            _freeze(controller, ["a", "b"])
            whole = np.ones(6)
            handles = [
                controller.all_reduce("a", whole[::2]),
                controller.all_reduce("b", np.ones(3).view(Named)),
            ]
            assert all((handle.wait() == comm.size).all() for handle in handles)
            assert whole.tolist() == [comm.size, 1] * 3
            assert controller.stats().plan_changes == 1

    threads(2).run(check)


def test_a_tensor_that_has_not_ended_is_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm, tune_fusion=False) as controller:
            _freeze(controller, ["a", "b"])
            first = controller.all_reduce("a", np.ones(3))
            with pytest.raises(ValueError, match="'a' was submitted again before"):
                controller.all_reduce("a", np.ones(3))
            controller.all_reduce("b", np.ones(3)).wait()
            assert (first.wait() == comm.size).all()

    threads(2).run(check)


def test_an_array_that_cannot_be_reduced_fails_the_controller_on_all_ranks(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm, tune_fusion=False) as controller:
            _freeze(controller, ["a", "b"])
            array = np.ones(3)
            handle = controller.all_reduce("b", array)
            array.flags.writeable = comm.rank != 0  # after the checks of the submission
            with pytest.raises((ValueError, CommunicationError)):
                controller.all_reduce("a", np.ones(3)).wait()
            with pytest.raises(CommunicationError):
                handle.wait()
            with pytest.raises(CommunicationError):
                controller.all_reduce("c", np.ones(3))

    with Threads(2) as world:
        assert world.outcomes(check) == [None, None]


def test_a_failure_that_a_submission_finds_ends_it(threads: World) -> None:
    class Ended:
        """A simulated flight (a collective in progress) that has ended with an error."""

        def __init__(self, controller: Controller) -> None:
            self._fail = controller._loop.fail

        def has_ended(self) -> bool:
            return True

        def settle(self, timeout_s: float | None) -> None:
            self._fail(PeerLostError("rank 1 is lost"))

    def check(comm: Communicator) -> None:
        controller = Controller(comm, tune_fusion=False)
        handle = controller.all_reduce("a", np.ones(3))
        handle.wait()
        handle._done, handle.flight = False, Ended(controller)  # type: ignore[assignment]
        with pytest.raises(PeerLostError, match="rank 1 is lost"):
            controller.all_reduce("a", np.ones(3))
        # a handle without a flight (a collective in progress), as after a job for which a rank was
        # not ready
        late = Handle(controller._loop, handle.request, np.ones(3))
        with pytest.raises(PeerLostError, match="rank 1 is lost"):
            late.wait(5)
        controller.close()

    with Threads(1) as world:
        world.run(check)


def test_nothing_is_launched_after_a_failure(threads: World) -> None:
    def check(comm: Communicator) -> None:
        controller = Controller(comm, tune_fusion=False)
        _freeze(controller, ["a"])
        plan = controller._loop._runner.plan
        assert plan is not None
        launched = plan.launched
        controller._loop.fail(PeerLostError("rank 1 is lost"))
        tensor = plan.tensors["a"]
        tensor.bucket.missing = 0
        controller._loop._launch_full()
        assert plan.launched == launched
        controller.close()

    with Threads(1) as world:
        world.run(check)


def test_a_void_bucket_keeps_the_result_that_no_thread_has_waited_for(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm, fusion_bytes=24) as controller:
            _freeze(controller, ["a", "b"])
            a, b, token = np.full(3, comm.rank + 1.0), np.ones(3), np.zeros(1)
            next_a, next_b = np.full(3, comm.rank + 5.0), np.full(3, comm.rank + 7.0)
            first = [controller.all_reduce("a", a), controller.all_reduce("b", b)]
            if comm.rank == 0:
                for handle in first:
                    handle.wait()
                later = [controller.all_reduce("a", next_a)]
                comm.send(token, 1)
                later.append(controller.all_reduce("b", next_b))
            else:
                comm.recv(token, 0)
                first[1].wait()
                later = [controller.all_reduce("b", next_b)]
                later[0].wait()  # this rank leaves the plan: the second bucket of "a" is void
                first[0].wait()
                later.append(controller.all_reduce("a", next_a))
            for handle in later:
                handle.wait()
            assert (a == 3).all() and (b == 2).all()
            assert (next_a == 11).all() and (next_b == 15).all()

    threads(2).run(check)


@pytest.mark.parametrize(("kind", "op"), [("pair", "minloc"), ("complex64", "average")])
def test_a_rank_votes_against_a_bucket_that_it_has_never_launched(
    threads: World, kind: str, op: str
) -> None:
    def array(rank: int) -> np.ndarray:
        if kind == "pair":
            return pairs(np.full(3, rank + 1.0, np.float32), [rank] * 3)
        return np.full(3, rank + 1, kind)

    def check(comm: Communicator) -> None:
        expected = {"pair": array(0), "complex64": np.full(3, 1.5, np.complex64)}[kind]
        for steps in range(1, 5):  # after one of these, a plan is new: its buckets have not run
            with Controller(comm, fusion_bytes=0) as controller:
                for _ in range(steps):
                    handles = [controller.all_reduce(n, array(comm.rank), op) for n in "ab"]
                    for handle in handles:
                        handle.wait()
                if comm.rank == 0:
                    handles = [controller.all_reduce(n, array(comm.rank), op) for n in "ab"]
                    found = [handle.wait() for handle in handles]
                else:
                    found = [controller.all_reduce(n, array(comm.rank), op).wait() for n in "ba"]
                assert all((each == expected).all() for each in found)

    threads(2).run(check)


def test_aliases_of_a_reduction_join_and_match(threads: World) -> None:
    def check(comm: Communicator) -> None:
        for op, expected in (("AVERAGE", 1.0), ("SUM", 2.0), ("product", 2.0)):
            with Controller(comm) as controller:
                if comm.rank == 0:
                    array = np.full(3, 2.0)
                    controller.all_reduce("a", array, op).wait()
                    assert (array == expected).all()
                controller.join(average_over="all")
                array = np.full(3, 2.0)
                controller.all_reduce("b", array, op if comm.rank else op.lower()).wait()

    threads(2).run(check)


def test_names_are_strings(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm, tune_fusion=False) as controller:
            for name in ("a", np.str_("a"), "a", "a", "a"):
                controller.all_reduce(name, np.ones(3)).wait()
            assert all(type(name) is str for name in controller._loop._open)
            with pytest.raises(TypeError, match="name: expected a string, got 3"):
                controller.all_reduce(3, np.ones(3))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="name: expected a string, got 3"):  # also if closed
            controller.all_reduce(3, np.ones(3))  # type: ignore[arg-type]

    threads(2).run(check)


def test_nothing_stays_of_a_closed_controller(threads: World) -> None:
    def check(comm: Communicator) -> list[weakref.ref[Any]]:
        with Controller(comm, tune_fusion=False) as controller:
            _freeze(controller, ["a"])
            array = np.ones(3)
            controller.all_reduce("a", array).wait()
            return [weakref.ref(controller._loop), weakref.ref(array)]

    found = threads(2).run(check)
    gc.collect()
    assert not any(reference() for references in found for reference in references)


# ---- the native object without a controller


def _tensors(names: str, length: int) -> tuple[list[PlannedTensor], PlannedBucket]:
    dtype = np.ones(1).dtype
    tensors = [
        PlannedTensor(
            Request(name=name, operation="all_reduce", dtype=DType.FLOAT64, shape=(length,))
        )
        for name in names
    ]
    for tensor in tensors:
        tensor.dtype = dtype
    return tensors, PlannedBucket(tuple(tensors))


def test_a_full_bucket_is_launched_once() -> None:
    launches: list[int] = []
    tensors, bucket = _tensors("ab", 3)
    opened: dict[str, Any] = {}
    planned = native.PlannedTensors(
        Handle,
        PlannedTensor,
        PlannedBucket,
        "owner",
        opened,
        lambda: launches.append(bucket.missing),
        None,
    )
    assert planned.submit("a", np.ones(3), "sum") is None  # no plan is set
    planned.follow(tensors)
    assert planned.submit("c", np.ones(3), "sum") is None
    assert planned.submit(["a"], np.ones(3), "sum") is None
    assert planned.submit("a", 3.0, "sum") is None
    assert planned.submit("a", np.ones(3), "max") is None
    assert planned.submit("a", np.ones((3, 1)), "sum") is None
    assert planned.submit("a", np.ones(3, np.int64), "sum") is None
    assert (bucket.missing, opened, planned.count) == (2, {}, 0)
    array = np.ones(3)
    handle = planned.submit("a", array, "sum")
    assert isinstance(handle, Handle)
    assert handle.array is array and handle.flight is None and handle.name == "a"
    assert opened == {"a": handle} and tensors[0].handle is handle
    assert not launches
    # the previous submission of "a" has not ended
    assert planned.submit("a", np.ones(3), "sum") is None
    planned.submit("b", np.ones(3), "sum")
    assert launches == [0]
    assert (planned.count, planned.bytes) == (2, 48)
    planned.leave()
    assert planned.submit("b", np.ones(3), "sum") is None
    planned.follow(tensors)
    planned.close()
    planned.follow(tensors)
    handle.complete(array)
    assert planned.submit("a", np.ones(3), "sum") is None
    with pytest.raises(TypeError, match="expected tensors of a frozen plan"):
        planned.follow([SimpleNamespace(bucket=bucket)])


def test_a_column_of_slots_is_read_and_written_at_once() -> None:
    column = native.SlotColumn(PlannedTensor, "handle")
    tensors, _ = _tensors("abc", 3)
    tensors[1].handle = held = Handle(cast(Any, "owner"), tensors[1].request, np.ones(3))
    assert column.values(tuple(tensors)) == (None, held, None)
    uses = sys.getrefcount(held)
    column.fill(tuple(tensors), held)
    assert all(tensor.handle is held for tensor in tensors)
    assert sys.getrefcount(held) == uses + 2
    column.fill(tuple(tensors), None)
    assert sys.getrefcount(held) == uses - 1
    assert column.values(()) == ()


def test_objects_without_the_slot_are_refused() -> None:
    column = native.SlotColumn(PlannedTensor, "handle")
    for call in (column.values, lambda objects: column.fill(objects, None)):
        with pytest.raises(TypeError, match="str has no slot handle"):
            call(("a string",))
    for name in ("no_such_name", "fits"):
        with pytest.raises(TypeError, match=f"has no slot '{name}': name it in __slots__"):
            native.SlotColumn(PlannedTensor, name)
    empty = PlannedTensor.__new__(PlannedTensor)
    with pytest.raises(AttributeError, match="PlannedTensor has no value in handle"):
        column.values((empty,))
