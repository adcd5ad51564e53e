"""Executes the actions that the ranks have agreed on: runs collectives, and follows frozen plans
(collectives in a fixed order, repeated in each step).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unisono import native
from unisono.controller import messages as m
from unisono.controller.frozen_plan import FrozenPlan, job_of
from unisono.controller.fusion.fusion_report import FusionReport
from unisono.controller.fusion.trial_plan import TrialPlan
from unisono.controller.handle import IN_PLACE, Flight, Handle
from unisono.controller.join import JoinedTensors
from unisono.controller.rank_state import (
    Action,
    Adopt,
    DrainPlan,
    EnterPlan,
    Event,
    HasDrained,
    HasFinished,
    HasStopped,
    StopPlan,
)
from unisono.controller.request import ranks_text
from unisono.controller.transfers.transfer import Transfer
from unisono.errors import MismatchError

_log = logging.getLogger("unisono.controller")


@dataclass(slots=True)
class Counters:
    """Counts that `Controller.stats` reports."""

    tensors_submitted: int = 0
    collectives_run: int = 0
    cache_hits: int = 0
    bytes: int = 0
    plan_changes: int = 0
    wait_s: float = 0.0


class ActionRunner:
    """Executes all actions except `Send`, which the loop executes. The lock `changed` protects the
    attributes.
    """

    def __init__(
        self,
        changed: threading.Condition,
        transfer: Transfer,
        open_handles: dict[str, Handle],
        planned: native.PlannedTensors,
        *,
        rank: int,
        size: int,
        stall_warning_s: float,
        on_left: Callable[[int], None],
    ) -> None:
        """`open_handles` maps each tensor's name to its most recent handle. `planned` submits
        tensors without the lock while it follows a plan. `on_left` is called with a rank that has
        closed its controller.
        """
        self.counters = Counters()
        self.open = open_handles
        self._planned = planned
        self.plan: FrozenPlan | None = None
        self.joined = JoinedTensors()
        self.last_joined: int | None = None
        self.stalls: tuple[m.Stalled, ...] = ()
        """The waiting tensors in the most recent answer of rank 0."""
        self.answers = 0
        """Number of rank 0's answers about waiting tensors so far."""
        self.fusion_report: FusionReport | None = None
        self._changed = changed
        self._transfer = transfer
        self._rank = rank
        self._size = size
        self._stall_warning_s = stall_warning_s
        self._on_left = on_left

    def act(self, action: Action) -> Sequence[Event]:
        """Executes one action. Returns the events that result immediately."""
        match action:
            case m.Run():
                self._launch(action)
            case m.Refuse():
                self._refuse(action)
            case Adopt():
                return self._adopt(action)
            case EnterPlan():
                return self._enter_plan(action.names)
            case StopPlan():
                return self._stop_plan(action.reason)
            case DrainPlan():
                return self._drain_plan(action.launched)
            case m.Tuned():
                self._note_report(action.report)
            case m.Joined():
                self._note_joined(action.last)
            case m.Stalls():
                self._note_stalls(action.stalls)
            case m.Left():
                self._on_left(action.rank)
        return ()

    # ---- tensors that all ranks have submitted

    def _launch(self, run: m.Run) -> None:
        with self._changed:
            requests = run.bucket.requests
            handles = [self.open[name] for name in run.bucket.names if name in self.open]
            takes_part = self._rank in run.active
            op, divisor = _averaged(run, self._size)
            if takes_part:
                job = job_of(handles, op)
            else:
                handles, job = [], self.joined.job(requests, op)
            if run.lengths and len(set(run.lengths)) > 1:
                job = replace(job, lengths=run.lengths)
            pending = self._transfer.begin(job)
            in_place = requests[0].operation in IN_PLACE
            flight = Flight(tuple(handles), pending, self._note_end, in_place, divisor=divisor)
            for handle in handles:
                handle.flight = flight
            self._changed.notify_all()
        if not takes_part:
            flight.settle(None)

    def _refuse(self, refusal: m.Refuse) -> None:
        with self._changed:
            handle = self.open.get(refusal.name)
            if handle is not None:
                handle.fail(MismatchError(refusal.text))
            self._changed.notify_all()

    def _note_end(self, flight: Flight) -> None:
        if flight.ran and flight.handles:
            self.counters.collectives_run += 1
        if not flight.ran:
            with self._changed:
                self._changed.notify_all()

    # ---- frozen plans

    def _adopt(self, adopt: Adopt) -> Sequence[Event]:
        with self._changed:
            self.counters.plan_changes += 1
            self._planned.leave()
            finished = self.plan
            self.plan = self._plan_of(adopt)
            if finished is not None:  # the old plan may hold tensors submitted after its end
                for handle in finished.unlaunched():
                    self.plan.add(self.plan.tensors[handle.name], handle)
            return self._enter_plan(adopt.carried)

    def _plan_of(self, adopt: Adopt) -> FrozenPlan:
        parts = (adopt.epoch, adopt.buckets, self._transfer, self._note_end, self.joined.stand_in)
        return FrozenPlan(*parts) if adopt.trial is None else TrialPlan(*parts, adopt.trial)

    def _enter_plan(self, names: Sequence[str]) -> Sequence[Event]:
        with self._changed:
            plan = self.plan
            assert plan is not None  # the rank has adopted a plan
            self._planned.leave()
            for name in names:
                plan.add(plan.tensors[name], self.open[name])
            # A trial needs the time of each submission, and submissions without the lock record no
            # time.
            if not (plan.stopped or isinstance(plan, TrialPlan)):
                self._planned.follow(plan.tensors.values())
            self._changed.notify_all()  # wakes threads that wait for a bucket
            if names and isinstance(plan, TrialPlan) and plan.finished:
                return [HasFinished(plan.epoch, plan.times())]
            return ()

    def _stop_plan(self, reason: str) -> Sequence[Event]:
        _log.debug("leaves the frozen plan: %s", reason)
        with self._changed:
            plan = self.plan
            self._planned.leave()
            if plan is None:
                return [HasStopped(0)]
            plan.stopped = True
            return [HasStopped(plan.launched)]

    def _drain_plan(self, launched: int) -> Sequence[Event]:
        plan = self.plan
        if plan is None:
            return [HasDrained(())]
        with self._changed:
            plan.void_up_to(launched)
            flights = plan.flights
        undone: list[Handle] = []
        for flight in flights:
            flight.settle(None)
            if not flight.ran:
                undone += flight.handles
        with self._changed:
            undone += plan.unlaunched()
            self.plan = None
            self.counters.plan_changes += 1
            return [HasDrained(tuple(handle.request for handle in undone if not handle._done))]

    def _note_report(self, report: FusionReport) -> None:
        if self._rank == 0:
            _log.info("fusion: %s", report)
        with self._changed:
            self.fusion_report = report

    # ---- answers of rank 0

    def _note_joined(self, last: int) -> None:
        with self._changed:
            self.last_joined = last
            self._changed.notify_all()

    def _note_stalls(self, stalls: tuple[m.Stalled, ...]) -> None:
        for stall in stalls:
            if stall.waited_s >= self._stall_warning_s and stall.missing:
                _log.warning(
                    "tensor %r has waited for %s for %.1f s; %s submitted it",
                    stall.name,
                    ranks_text(stall.missing),
                    stall.waited_s,
                    ranks_text(stall.present),
                )
        with self._changed:
            self.stalls = stalls
            self.answers += 1
            self._changed.notify_all()


def _averaged(run: m.Run, size: int) -> tuple[str, int]:
    """Returns the reduction to run, and the number to divide its result by."""
    op, active = run.bucket.requests[0].op, len(run.active)
    if op in ("avg", "average") and active < size and not run.average_over_all:
        return "sum", active
    return op, 1
