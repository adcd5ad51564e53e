"""The loop of one rank: passes events to the agreement, and executes the resulting actions.

A thread waits for messages of other ranks. While the ranks follow a frozen plan, this thread
sleeps, and the program's own threads do the work: `submit` launches buckets, and `Handle.wait` ends
them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from unisono import native
from unisono.communicator import as_integer, common_name, dtype_of
from unisono.controller import messages as m
from unisono.controller.action_runner import ActionRunner, Counters
from unisono.controller.agreement import State, step
from unisono.controller.argument_checks import ArgumentChecks, plain_name
from unisono.controller.channel import Channel
from unisono.controller.frozen_plan import PlannedBucket, PlannedTensor
from unisono.controller.fusion.fusion_report import FusionReport
from unisono.controller.fusion.fusion_tuner import FusionTuner
from unisono.controller.fusion.trial_plan import TrialPlan
from unisono.controller.handle import Handle
from unisono.controller.rank_state import (
    CannotFollow,
    Closes,
    Event,
    HasFinished,
    Received,
    Send,
    Submitted,
    WantsJoin,
    WantsStalls,
)
from unisono.controller.request import Request, ranks_text
from unisono.controller.transfers.transfer import Array, Transfer
from unisono.errors import (
    AbortedError,
    CollectiveTimeoutError,
    PeerLostError,
    UnisonoError,
)
from unisono.timeline import CONTROLLER_THREAD, EventKind, TimelineWriter

_SUBMITTED, _WAITED = int(EventKind.SUBMITTED), int(EventKind.WAITED)
# Maximum time in which a closing controller sends its last message.
_CLOSE_S = 5.0
# Maximum time in which rank 0 answers the question which tensors wait.
_ANSWER_S = 1.0
# Time in which ranks that have just left a plan can announce their tensors before a warning.
_ANNOUNCE_S = 0.1


class Loop:
    """One rank's part of a controller. Several threads may call its methods."""

    def __init__(
        self,
        channel: Channel,
        transfer: Transfer,
        *,
        fusion_bytes: int,
        stall_warning_s: float,
        timeout_s: float,
        timeline: TimelineWriter,
        tuner: FusionTuner | None = None,
    ) -> None:
        """`tuner` tunes the buckets of plans. None: `fusion_bytes` determines the buckets."""
        self._timeline = timeline
        self._record = timeline.record
        self._channel = channel
        self._transfer = transfer
        self._checks = ArgumentChecks(channel.rank, channel.size)
        self.stall_warning_s = stall_warning_s
        """Seconds after which a tensor that waits is logged on all ranks."""
        self._timeout_s = timeout_s
        self._state = State.first(channel.rank, channel.size, fusion_bytes, tuner)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._events: deque[Event] = deque()
        self._groups: dict[str, tuple[str, ...]] = {}
        self._open: dict[str, Handle] = {}
        """The most recent handle of each name."""
        self._planned = native.PlannedTensors(
            Handle,
            PlannedTensor,
            PlannedBucket,
            self,
            self._open,
            self._launch_full,
            timeline.ring,
        )
        self.submit_planned = self._planned.submit
        """Submits an all_reduce of the frozen plan without the lock. Returns None for other
        tensors."""
        self._runner = ActionRunner(
            self._changed,
            transfer,
            self._open,
            self._planned,
            rank=channel.rank,
            size=channel.size,
            stall_warning_s=stall_warning_s,
            on_left=self._note_left,
        )
        self._counters = self._runner.counters
        self._entering = 0
        """Number of submitted tensors that the thread has not processed yet."""
        self.waits = 0
        """Number of times that the program has waited for a tensor."""
        self._joining = False
        self._error: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=CONTROLLER_THREAD, daemon=True)
        self._thread.start()

    # ---- for the program's threads

    def submit(
        self, name: str, array: Array, operation: str, op: str, root: int, priority: int
    ) -> Handle:
        """Submits `array`. Does not wait for other ranks. Raises the errors of `ArgumentChecks`."""
        with self._lock:  # the same lock as `_changed`, but faster to acquire
            name, op = plain_name(name), common_name(op)
            if self._error is not None or self._closing:
                self._require_usable()
            root = self._checks.checked_root(name, array, operation, root)
            plan = self._runner.plan
            tensor = None if plan is None or plan.stopped else plan.tensors.get(name)
            if plan is not None and tensor is not None and tensor.fits(array, operation, op, root):
                handle = Handle(self, tensor.request, array)
                self._enter(name, handle, tensor.nbytes)
                self._counters.cache_hits += 1
                try:
                    plan.add(tensor, handle)
                except Exception as error:
                    self._fail_bucket(error)
                    raise
                if isinstance(plan, TrialPlan) and plan.finished:
                    self._post(HasFinished(plan.epoch, plan.times()))
                return handle
            request = Request(
                name=name,
                operation=operation,
                dtype=dtype_of(array),
                shape=tuple(array.shape),
                op=op,
                root=root,
                group=self._groups.get(name, ()),
                priority=as_integer(priority, f"tensor {name!r}: priority"),
                phase=self.waits,
            )
            self._checks.check(request)
            handle = Handle(self, request, array)
            self._enter(name, handle, request.nbytes)
            self._runner.joined.remember(array, request.dtype)
            self._entering += 1
            self._post(Submitted((request,)))
            return handle

    @property
    def counters(self) -> Counters:
        """The counts since the controller was created, including tensors submitted without the
        lock.
        """
        count, nbytes = self._planned.count, self._planned.bytes
        found = self._counters
        return replace(
            found,
            tensors_submitted=found.tensors_submitted + count,
            cache_hits=found.cache_hits + count,
            bytes=found.bytes + nbytes,
        )

    @property
    def fusion_report(self) -> FusionReport | None:
        """The most recent decision of the fusion tuner; None before the first decision."""
        return self._runner.fusion_report

    def group(self, names: Sequence[str]) -> None:
        """Declares that these tensors always run together."""
        with self._changed:
            taken = [name for name in names if name in self._groups]
            if taken:
                raise ValueError(f"tensor {taken[0]!r} is in a group already")
            self._groups.update(dict.fromkeys(names, tuple(names)))

    def _enter(self, name: str, handle: Handle, nbytes: int) -> None:
        opened = self._open
        before = opened.get(name)
        if before is not None and not before._done:
            self._settle_ended(before)
            if self._error is not None:  # the flight ended with an error
                raise self._error
        # There is no call between this test and the assignment below. Threads switch at calls, and
        # after a switch, another thread could submit the same name without the lock.
        if name in opened and not opened[name]._done:
            raise ValueError(
                f"tensor {name!r} was submitted again before its last call ended: wait for that "
                "handle first, or use another name"
            )
        opened[name] = handle
        self._record(_SUBMITTED, name, 0, nbytes)
        self._counters.tensors_submitted += 1
        self._counters.bytes += nbytes

    def _launch_full(self) -> None:
        """Launches the buckets that have become full by a submission without the lock."""
        with self._lock:
            plan = self._runner.plan
            if plan is not None and self._error is None and not self._closing:
                try:
                    plan.launch_full()
                except Exception as error:
                    self._fail_bucket(error)
                    raise

    def _fail_bucket(self, error: Exception) -> None:
        """Fails the controller because a bucket of the plan did not begin: its tensors have left
        the plan, but no collective carries them.
        """
        if not isinstance(error, UnisonoError):
            error = AbortedError(f"a bucket of the plan did not begin: {error!r}")
        self.fail(error)

    def _settle_ended(self, handle: Handle) -> None:
        """Ends a handle whose flight has ended, in case no thread has waited for the handle. The
        caller must hold the lock.
        """
        flight = handle.flight
        if flight is not None and flight.has_ended():
            flight.settle(None)

    def wait_for_flight(self, handle: Handle, timeout_s: float | None, is_late: bool) -> None:
        """Waits until the handle has a flight (its collective has begun) or has ended; warns of
        stalls.

        `is_late`: the handle has already waited for ranks to begin its bucket, so the warning about
        these ranks is not delayed again.

        Raises `TimeoutError` after `timeout_s` seconds. After the communicator's timeout, the
        controller fails with `CollectiveTimeoutError`, which names the ranks that are missing.
        """
        began_s = time.monotonic()
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        warn_s = _ANNOUNCE_S if is_late else self.stall_warning_s
        with self._changed:
            while handle.flight is None and not handle._done:
                if self._error is not None:  # the controller failed during a void flight
                    handle.fail(self._error)
                    continue
                self._leave_plan_for(handle)
                waited_s = time.monotonic() - began_s
                if waited_s >= limit_s:
                    break
                if waited_s >= warn_s:
                    warn_s += self.stall_warning_s
                    self._leave_finished_plan()
                    self._post(WantsStalls())
                self._changed.wait(min(limit_s, warn_s) - waited_s)
            else:
                ended_s = time.monotonic()
                self._counters.wait_s += ended_s - began_s
                self._record(_WAITED, handle.name, 0, 0, int(1e9 * began_s), int(1e9 * ended_s))
                return
        if timeout_s is not None and timeout_s <= self._timeout_s:
            raise TimeoutError(f"tensor {handle.name!r} still waits: timeout after {timeout_s:g} s")
        self.fail(CollectiveTimeoutError(self._late_text(handle)))

    def look_for_late_ranks(self, handle: Handle) -> None:
        """Leaves the plan if the bucket of this handle waits for ranks, so that rank 0 can name
        these ranks.

        Rank 0 knows which ranks have submitted a tensor only while the ranks negotiate.
        """
        with self._lock:
            plan, flight = self._runner.plan, handle.flight
            if plan is None or flight is None or flight.has_ended():
                return
            reason = f"{handle.name!r} waits for a rank that has not begun its bucket"
            self._post(CannotFollow(plan.epoch, reason))

    def _leave_plan_for(self, handle: Handle) -> None:
        """Leaves the plan if the program waits for a bucket that this rank may never fill."""
        plan = self._runner.plan
        if plan is None or plan.stopped or self._entering:
            return  # tensors that are now being submitted may fill the bucket
        tensor = plan.tensors.get(handle.name)
        if tensor is not None and tensor.handle is handle:
            self._post(CannotFollow(plan.epoch, plan.lacking(handle.name)))

    def _leave_finished_plan(self) -> None:
        """Leaves a trial whose passes were all launched, so that this rank tells rank 0 which of
        its tensors wait for the next plan.
        """
        plan = self._runner.plan
        if isinstance(plan, TrialPlan) and plan.finished:
            self._post(CannotFollow(plan.epoch, "a rank waits for the end of a trial"))

    def _leave_plan_with_tensors(self) -> None:
        """Leaves a plan in which tensors wait, and waits until all ranks have left the plan."""
        plan = self._runner.plan
        if plan is None or not plan.has_waiting:
            return
        self._post(CannotFollow(plan.epoch, "a rank asks for stalls"))
        self._changed.wait_for(lambda: self._runner.plan is not plan or self._error, _ANSWER_S)

    def _late_text(self, handle: Handle) -> str:
        self.ask_stalls()
        late = next((stall for stall in self._runner.stalls if stall.name == handle.name), None)
        missing = f": {ranks_text(late.missing)} did not submit it" if late else ""
        return (
            f"tensor {handle.name!r}: timeout after {self._timeout_s:g} s on rank "
            f"{self._channel.rank}{missing}"
        )

    def ask_stalls(self) -> tuple[m.Stalled, ...]:
        """Returns the waiting tensors that rank 0 reports. If rank 0 does not answer in time,
        returns its previous answer.
        """
        with self._changed:
            self._require_usable()
            self._leave_plan_with_tensors()
            before = self._runner.answers
            self._post(WantsStalls())
            self._changed.wait_for(lambda: self._runner.answers > before or self._error, _ANSWER_S)
            return self._runner.stalls

    def join(self, average_over_all: bool, timeout_s: float | None) -> int:
        """Contributes neutral values, which change no result, until all ranks have joined. Returns
        the last rank that joined.
        """
        with self._changed:
            self._require_usable()
            self._runner.last_joined = None
            self._post(WantsJoin(average_over_all))
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            self._joining = True
            self._changed.wait_for(lambda: self._last() is not None or self._error, limit_s)
            self._joining = False
            last = self._last()
            if last is not None:
                return last  # valid even if other ranks have since closed their controllers
            self._require_usable()
            raise TimeoutError(f"not all ranks have joined: timeout after {limit_s:g} s")

    def _last(self) -> int | None:
        return self._runner.last_joined

    def close(self) -> None:
        """Closes the controller. Tensors of other ranks that still need this rank fail. Never
        hangs.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._planned.close()
            self._post(Closes())
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
        with self._changed:
            self._end(AbortedError("the controller was closed before this tensor was complete"))
        self._transfer.close()
        self._channel.close()

    def fail_all_ranks(self, error: BaseException) -> None:
        """Ends the controller because the program of this rank has raised `error`."""
        rank = self._channel.rank
        self.fail(AbortedError(f"rank {rank} raised {type(error).__name__}: {error}"))

    def fail(self, error: Exception) -> None:
        """Fails all handles, and the controller on all ranks."""
        with self._changed:
            is_first = self._error is None and not self._closing
            if self._error is None:
                self._end(error)
                if not self._closing:
                    self._channel.fail(error)
        if is_first:
            self._timeline.keep(error)

    def _end(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._planned.close()
        for handle in self._open.values():
            if handle.flight is None:
                handle.fail(error)
        self._changed.notify_all()

    def _require_usable(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise AbortedError("this controller is closed")

    def _post(self, event: Event) -> None:
        self._events.append(event)
        self._channel.wake()

    # ---- the loop's own thread

    def _run(self) -> None:
        try:
            while not self._channel.closed:
                events = self._take_events()
                if not events:
                    source, received = self._channel.receive(self._is_idle)
                    events = [Received(source, received)] if received else []
                while events:
                    events = self._take_step(events)
        except UnisonoError as error:
            self.fail(error)
        except Exception as error:  # a bug in this library must not hang the program
            self.fail(AbortedError(f"the controller's thread failed: {error!r}"))
            raise

    def _is_idle(self) -> bool:
        """Returns True if this rank does not wait for a decision of other ranks."""
        with self._lock:
            waits = any(each.flight is None and not each._done for each in self._open.values())
            return not (waits or self._events or self._joining)

    def _take_events(self) -> list[Event]:
        with self._changed:
            events = list(self._events)
            self._events.clear()
            return _gathered(events)

    def _take_step(self, events: Sequence[Event]) -> list[Event]:
        """Passes events to the agreement and executes its actions. Returns the resulting events."""
        with self._changed:
            self._state, actions = step(self._state, events, time.monotonic())
        follow: list[Event] = []
        sends: dict[int, list[m.Message]] = {}
        for action in actions:
            if isinstance(action, Send):
                sends.setdefault(action.dst, []).append(action.message)
        for dst, found in sends.items():
            self._channel.send(dst, found)
        for action in actions:
            follow += self._runner.act(action)
        if any(isinstance(event, Closes) for event in events):
            self._channel.stop()
        with self._changed:
            self._entering -= sum(
                len(event.requests) for event in events if isinstance(event, Submitted)
            )
            self._changed.notify_all()
        return follow

    def _note_left(self, rank: int) -> None:
        if rank != self._channel.rank:
            with self._changed:
                self._end(PeerLostError(f"rank {rank} has closed its controller"))


def _gathered(events: Sequence[Event]) -> list[Event]:
    """Merges consecutive submissions, so that they become one message."""
    gathered: list[Event] = []
    for submits, found in itertools.groupby(events, lambda event: isinstance(event, Submitted)):
        if submits:
            requests = [each.requests for each in found if isinstance(each, Submitted)]
            gathered.append(Submitted(tuple(itertools.chain.from_iterable(requests))))
        else:
            gathered += found
    return gathered
