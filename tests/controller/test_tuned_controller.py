"""Fusion that tunes itself on real ranks: sums are correct, ranks agree, losses are reported."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Me, Processes, Threads
from time_limits import limit_s
from unisono import Communicator, PeerLostError
from unisono.controller import (
    CommunicatorTransfer,
    Controller,
    FusionReport,
    LinkCost,
    LinkTransfer,
)
from unisono.controller.fusion.tuning_settings import TuningSettings

World = Callable[[int], Threads]

SIZES = {f"layer {i}": 50 + 400 * i for i in range(8)}
STEPS = TuningSettings().most_steps + 10


def _steps(controller: Controller, count: int, sizes: dict[str, int] = SIZES) -> None:
    """Runs steps that submit the tensors in an order that differs between ranks, and checks the
    sums.
    """
    rank, size = controller.rank, controller.size
    for step in range(count):
        arrays = {name: np.full(length, rank + step, np.float32) for name, length in sizes.items()}
        names = list(sizes)
        order = names[step % len(names) :] + names[: step % len(names)] if rank else names
        handles = [controller.all_reduce(name, arrays[name]) for name in order]
        for handle in handles:
            handle.wait()
        total = sum(range(size)) + size * step
        assert all((array == total).all() for array in arrays.values()), step


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_stay_right_and_all_ranks_have_the_report(
    ranks: int, threads: World, caplog: pytest.LogCaptureFixture
) -> None:
    def check(comm: Communicator) -> Any:
        with Controller(comm, tune_fusion=True) as controller:
            _steps(controller, STEPS)
            return controller.fusion_report(), controller.stats().plan_changes

    with caplog.at_level(logging.INFO, "unisono.controller"):
        results = threads(ranks).run(check)
    reports = [report for report, _ in results]
    assert all(report == reports[0] for report in reports)
    (report, changes) = results[0]
    assert isinstance(report, FusionReport)
    assert sorted(name for names in report.buckets for name in names) == sorted(SIZES)
    assert sum(report.bucket_bytes) == 4 * sum(SIZES.values())
    assert report.before_bucket_bytes == (4 * sum(SIZES.values()),)
    assert report.alpha_s is not None and report.residual is not None
    # the trial and the last plan; more after a comparison, or if an overloaded rank left a plan
    assert changes >= 2 and report.steps_used <= TuningSettings().most_steps
    said = [each.getMessage() for each in caplog.records]
    assert [text for text in said if text.startswith("fusion")] == [f"fusion: {report}"]


def test_costs_of_a_link_are_not_underestimated(threads: World) -> None:
    cost = LinkCost(latency_s=1e-3, s_per_byte=1e-6)

    def check(comm: Communicator) -> Any:
        transfer = LinkTransfer(CommunicatorTransfer.over(comm), cost)
        with Controller(comm, tune_fusion=True, transfer=transfer) as controller:
            _steps(controller, 30, {name: 4 * length // 50 for name, length in SIZES.items()})
            report = controller.fusion_report()
            # the comparison of the tuned buckets with the previous buckets has not ended
            if report is None:
                state = controller._loop._state
                if state.coordinator is not None and state.coordinator.tuner is not None:
                    report = state.coordinator.tuner.draft
            return report

    report = threads(2).run(check)[0]
    # A busy machine may add time to that of the simulated link, but cannot save time.
    whole = sum(report.before_bucket_bytes)
    assert report.alpha_s + report.beta_s_per_byte * whole > 0.8 * cost.time_s(whole)
    assert report.alpha_s > 0.3 * cost.latency_s or report.beta_s_per_byte > cost.s_per_byte


@pytest.mark.parametrize(
    ("options", "tunes"),
    [({}, True), ({"tune_fusion": False}, False), ({"fusion_bytes": 1 << 20}, False)],
)
def test_tuning_is_on_unless_the_program_chose(options: dict[str, Any], tunes: bool) -> None:
    def check(comm: Communicator) -> Any:
        with Controller(comm, **options) as controller:
            _steps(controller, STEPS)
            return controller.fusion_report() is not None

    for reproducible in (False, True):
        with Threads(2, reproducible=reproducible) as world:
            assert world.run(check) == [tunes] * 2


def test_a_given_transfer_is_not_tuned(threads: World) -> None:
    def check(comm: Communicator) -> Any:
        transfer = CommunicatorTransfer.over(comm)
        with Controller(comm, transfer=transfer) as controller:
            _steps(controller, STEPS)
            return controller.fusion_report()

    assert threads(2).run(check) == [None] * 2


def test_buckets_of_a_chosen_size_are_tuned(threads: World) -> None:
    def check(comm: Communicator) -> Any:
        with Controller(comm, fusion_bytes=5000, tune_fusion=True) as controller:
            _steps(controller, STEPS)
            return controller.fusion_report()

    report = threads(2).run(check)[0]
    assert len(report.before_bucket_bytes) > 2


def test_another_set_of_names_is_tuned_anew(threads: World) -> None:
    other = dict(list(SIZES.items())[2:])

    def check(comm: Communicator) -> Any:
        with Controller(comm, tune_fusion=True) as controller:
            _steps(controller, STEPS)
            first = controller.fusion_report()
            _steps(controller, STEPS, other)
            second = controller.fusion_report()
            _steps(controller, 40)
            return first, second, controller.fusion_report()

    first, second, third = threads(2).run(check)[0]
    assert {name for names in second.buckets for name in names} == other.keys() != first
    # the tuner still knows its result for the first set of tensors
    assert third is second or third == second


def test_waits_within_a_step_are_tuned_too(threads: World) -> None:
    def check(comm: Communicator) -> Any:
        with Controller(comm, tune_fusion=True) as controller:
            for _ in range(STEPS):
                a = np.ones(300, np.float32)
                controller.all_reduce("a", a).wait()
                arrays = [a * 2, a * 3, a * 4]
                handles = [controller.all_reduce(f"b{i}", array) for i, array in enumerate(arrays)]
                for handle in handles:
                    handle.wait()
                for factor, array in zip((2, 3, 4), arrays, strict=True):
                    assert (array == factor * comm.size**2).all()
            return controller.fusion_report()

    report = threads(2).run(check)[0]
    assert report is not None and ("a",) in report.buckets  # a separate phase for "a"


def test_tensor_that_is_a_step_ahead_at_the_end_of_a_trial_runs_in_the_next_plan(
    threads: World,
) -> None:
    def check(comm: Communicator) -> Any:
        def submit(name: str, step: int) -> Any:
            array = np.full(100, comm.rank + step)
            return controller.all_reduce(name, array)

        def require(handle: Any, step: int) -> None:
            assert (handle.wait() == sum(range(comm.size)) + comm.size * step).all()

        with Controller(comm, fusion_bytes=0, tune_fusion=True) as controller:
            ahead = submit("a", 0)
            for step in range(STEPS):
                b = submit("b", step)
                require(ahead, step)
                ahead = submit("a", step + 1)
                c = submit("c", step)
                require(b, step)
                require(c, step)
            require(ahead, STEPS)
            return controller.fusion_report(), controller.stats().plan_changes

    for report, changes in threads(2).run(check):
        assert report is not None and changes >= 2


def dies_in_a_trial(me: Me) -> None:
    """Kills rank 1 in the middle of a step of the second trial."""
    comm = me.join()
    controller = Controller(comm, tune_fusion=True)
    _steps(controller, 40)
    if me.rank == 1:
        controller.all_reduce("layer 0", np.zeros(SIZES["layer 0"], np.float32))
        os.kill(os.getpid(), signal.SIGKILL)
    me.attempt("lost", _steps, controller, 1)


def test_rank_that_is_killed_in_a_trial_is_named() -> None:
    with Processes(dies_in_a_trial, 3) as ranks:
        for fact in ranks.wait_for("lost", [0, 2]):
            assert fact["error"] == PeerLostError.__name__ and "rank 1" in fact["text"]


def test_rank_that_is_late_at_the_end_of_a_trial_is_named(threads: World) -> None:
    """Launches all buckets of the trial on ranks 0 and 2, while rank 1 lacks a tensor. A query for
    stalled tensors must name rank 1.
    """
    settings = TuningSettings()
    # number of steps until the first trial ends
    first = 3 + 2 * settings.warm_up + settings.measured + 1

    def check(comm: Communicator) -> None:
        with Controller(comm, tune_fusion=True, stall_warning_s=0.2) as controller:
            _steps(controller, first - 1)
            handles = [
                controller.all_reduce(name, np.ones(length, np.float32))
                for name, length in SIZES.items()
                if comm.rank != 1 or name != "layer 7"
            ]
            if comm.rank == 1:
                assert named.wait(20)
                last = np.ones(SIZES["layer 7"], np.float32)
                handles.append(controller.all_reduce("layer 7", last))
            elif comm.rank == 0:
                until_s = time.monotonic() + limit_s(5)
                missing: list[tuple[int, ...]] = []
                # repeats the query, since the ranks must first leave the plan and announce their
                # tensors
                while missing != [(1,)] and time.monotonic() < until_s:
                    stalls = [each for each in controller.stalls() if each.name == "layer 7"]
                    missing = [each.missing for each in stalls]
                assert missing == [(1,)]
                named.set()
            for handle in handles:
                handle.wait()
            _steps(controller, 3)

    named = threading.Event()
    threads(3).run(check)
