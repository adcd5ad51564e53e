"""One rank of a simulated world: a program, and a loop that does the work of `loop.py` without a
thread.

Each move of the program or of the loop is atomic, and the world chooses the next move. So the
program may submit tensors after the agreement's decision and before the loop's action.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from controller.ledger import Ledger, SimulatedTransfer, Submission
from unisono.controller import messages as m
from unisono.controller import rank_state as mb
from unisono.controller.agreement import State, step
from unisono.controller.frozen_plan import FrozenPlan, job_of
from unisono.controller.fusion.fusion_report import FusionReport
from unisono.controller.fusion.trial_plan import TrialPlan
from unisono.controller.handle import IN_PLACE, Flight, Handle
from unisono.controller.join import JoinedTensors
from unisono.controller.request import Request
from unisono.controller.transfers.transfer import Job
from unisono.errors import AbortedError, MismatchError, PeerLostError
from unisono.types import DType

# ---- commands of a program


@dataclass(frozen=True)
class Submit:
    """Submits a tensor."""

    name: str
    shape: tuple[int, ...] = (2,)
    operation: str = "all_reduce"
    op: str = "sum"
    root: int = -1
    dtype: str = "float32"
    priority: int = 0
    group: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wait:
    """Waits for the latest tensor of this name."""

    name: str


@dataclass(frozen=True)
class JoinAll:
    """Contributes nothing until all ranks have joined."""

    average_over_all: bool = False


@dataclass(frozen=True)
class Ask:
    """Asks which tensors wait for other ranks."""


@dataclass(frozen=True)
class Close:
    """Closes the controller."""


Command = Submit | Wait | JoinAll | Ask | Close


class SimulatedRank:
    """A simulated rank. The world sets `now_s`, and takes the messages to send from `outbox`."""

    def __init__(
        self,
        state: State,
        program: Sequence[Command],
        ledger: Ledger,
        now_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        """`now_ns` reads the clock by which trials of plans are measured."""
        self.state = state
        self.rank = state.member.rank
        self.program = tuple(program)
        self.position = 0
        self.begun = False
        """True if the command at `position` has begun, and waits."""
        self.transfer = SimulatedTransfer(self.rank, ledger, now_ns)
        self.now_ns = now_ns
        self.plan: FrozenPlan | None = None
        self.handles: dict[str, Handle] = {}
        """The last handle of each name."""
        self.outcomes: dict[Submission, Handle] = {}
        self.stalls: list[tuple[m.Stalled, ...]] = []
        self.reports: list[FusionReport] = []
        self.reasons: list[str] = []
        """Reasons why this rank left frozen plans."""
        self.decisions: list[mb.Action] = []
        self.last_joined: int | None = None
        self.error: Exception | None = None
        self.waits = 0
        self.counts: Counter[str] = Counter()
        self.events: deque[mb.Event] = deque()
        self.follow: list[mb.Event] = []
        self.actions: deque[mb.Action] = deque()
        self.awaited: list[Flight] = []
        """The flights that the loop waits for before it goes on."""
        self.draining = False
        self._broke = -1
        self.now_s = 0.0
        self.outbox: dict[int, list[m.Message]] = {}

    # ---- the program

    @property
    def finished(self) -> bool:
        """True if the program has ended."""
        return self.position == len(self.program)

    def program_moves(self) -> bool:
        """Returns True if the program can continue now."""
        if self.finished:
            return False
        if not self.begun or self.error is not None:
            return True
        match self.program[self.position]:
            case Wait(name):
                handle = self.handles[name]
                flight = handle.flight
                return handle._done or (flight and flight.has_ended()) or self._departs(handle)
            case JoinAll():
                return self.last_joined is not None
            case Ask():
                return len(self.stalls) > self.counts["asked"]
        raise AssertionError("only these commands wait")

    def move_program(self) -> None:
        """Begins or continues the current command. Advances to the next command after its end."""
        command = self.program[self.position]
        if self.error is not None:
            self.position = len(self.program)
            return
        match command:
            case Submit():
                self._submit(command)
            case Wait(name) if not self._wait(self.handles[name]):
                self.begun = True
                return
            case JoinAll() if not self.begun:
                self.last_joined = None
                self.events.append(mb.WantsJoin(command.average_over_all))
                self.begun = True
                return
            case Ask() if not self.begun:
                self._ask()
                self.begun = True
                return
            case Close():
                self.events.append(mb.Closes())
                self.error = AbortedError("closed")
        self.position += 1
        self.begun = False

    def _submit(self, command: Submit) -> None:
        name = command.name
        array = np.empty(command.shape, command.dtype)
        submission = Submission(name, self.counts[name])
        self.counts[name] += 1
        self.transfer.know(array, submission)
        plan = self.plan
        tensor = plan.tensors.get(name) if plan is not None and not plan.stopped else None
        fits = tensor and tensor.fits(array, command.operation, command.op, command.root)
        if plan is not None and tensor is not None and fits:
            self._enter(submission, Handle(None, tensor.request, array))
            plan.add(tensor, self.handles[name])
            self.events += _finished(plan)
            return
        request = Request(
            name=name,
            operation=command.operation,
            dtype=DType[command.dtype.upper()],
            shape=command.shape,
            op=command.op,
            root=command.root,
            group=command.group,
            priority=command.priority,
            phase=self.waits,
        )
        self._enter(submission, Handle(None, request, array))
        self.events.append(mb.Submitted((request,)))

    def _enter(self, submission: Submission, handle: Handle) -> None:
        before = self.handles.get(submission.name)
        assert before is None or before.done, f"{submission.name!r} is submitted while it waits"
        self.handles[submission.name] = self.outcomes[submission] = handle

    def _wait(self, handle: Handle) -> bool:
        """Continues a wait. Returns True if the wait has ended."""
        if not self.begun and not handle._done:
            self.waits += 1
        while not handle._done:
            flight = handle.flight
            if flight is not None and flight.has_ended():
                flight.settle(None)
                continue
            if self._departs(handle):
                assert self.plan is not None
                self._broke = self.plan.epoch
                reason = self.plan.lacking(handle.name)
                self.events.append(mb.CannotFollow(self.plan.epoch, reason))
            return False
        return True

    def _departs(self, handle: Handle) -> bool:
        """Returns True if the program waits for a tensor of the frozen plan, but the tensor's
        bucket lacks other tensors. The program must then report that it cannot follow the plan.
        """
        plan = self.plan
        if handle.flight is not None or plan is None or plan.stopped or plan.epoch == self._broke:
            return False
        if any(isinstance(each, mb.Submitted | mb.EnterPlan) for each in self._under_way()):
            return False  # the loop may be about to add the bucket's missing tensor to the plan
        tensor = plan.tensors.get(handle.name)
        return tensor is not None and tensor.handle is handle

    def _under_way(self) -> Iterator[mb.Event | mb.Action]:
        yield from self.events
        yield from self.actions

    def _ask(self) -> None:
        self.counts["asked"] = len(self.stalls)
        plan = self.plan
        if plan is not None and any(tensor.handle for tensor in plan.tensors.values()):
            self.events.append(mb.CannotFollow(plan.epoch, "a rank asks for stalls"))
        if isinstance(plan, TrialPlan) and plan.finished:
            self.events.append(mb.CannotFollow(plan.epoch, "a rank waits for the end of a trial"))
        self.events.append(mb.WantsStalls())

    # ---- the loop

    @property
    def between_turns(self) -> bool:
        """True if the loop can take a message now."""
        return not (self.awaited or self.draining or self.actions or self.follow)

    def loop_moves(self) -> bool:
        """Returns True if the loop can continue without a message."""
        if self.awaited:
            return all(flight.has_ended() for flight in self.awaited)
        return bool(self.draining or self.actions or self.follow or self.events)

    def move_loop(self) -> None:
        """Makes one move: ends flights (collectives in progress), performs an action of the
        agreement, or passes the waiting events to the agreement.
        """
        if self.awaited or self.draining:
            self._go_on()
        elif self.actions:
            self._act(self.actions.popleft())
        elif self.follow:
            events, self.follow = self.follow, []
            self.take(events)
        else:
            events = list(self.events)
            self.events.clear()
            self.take(events)

    def take(self, events: Sequence[mb.Event]) -> None:
        """Passes events to the agreement."""
        self.state, actions = step(self.state, events, self.now_s)
        for action in actions:
            if isinstance(action, mb.Send):
                self.outbox.setdefault(action.dst, []).append(action.message)
            else:
                self.actions.append(action)

    def _act(self, action: mb.Action) -> None:
        self.decisions.append(action)
        match action:
            case m.Run():
                self._launch(action)
            case m.Refuse():
                handle = self.handles.get(action.name)
                if handle is not None:
                    handle.fail(MismatchError(action.text))
            case mb.Adopt():
                finished = self.plan
                self.plan = self._plan_of(action)
                for handle in () if finished is None else finished.unlaunched():
                    self.plan.add(self.plan.tensors[handle.name], handle)
                self._carry(action.carried)
            case m.Tuned():
                self.reports.append(action.report)
            case mb.EnterPlan():
                self._carry(action.names)
            case mb.StopPlan():
                self.reasons.append(action.reason)
                if self.plan is not None:
                    self.plan.stopped = True
                self.follow.append(mb.HasStopped(self.plan.launched if self.plan else 0))
            case mb.DrainPlan():
                self._drain(action.launched)
            case m.Joined():
                self.last_joined = action.last
            case m.Stalls():
                self.stalls.append(action.stalls)
            case m.Left() if action.rank != self.rank:
                self._lose(PeerLostError(f"rank {action.rank} has closed its controller"))

    def _plan_of(self, action: mb.Adopt) -> FrozenPlan:
        parts = (action.epoch, action.buckets, self.transfer, _ignore, JoinedTensors().stand_in)
        if action.trial is None:
            return FrozenPlan(*parts)
        return TrialPlan(*parts, action.trial, self.now_ns)

    def _carry(self, names: Sequence[str]) -> None:
        plan = self.plan
        assert plan is not None and not plan.stopped
        for name in names:
            plan.add(plan.tensors[name], self.handles[name])
        self.follow += _finished(plan) if names else []

    def _launch(self, run: m.Run) -> None:
        requests = run.bucket.requests
        lengths = run.lengths if len(set(run.lengths)) > 1 else ()
        if self.rank in run.active:
            handles = [self.handles[name] for name in run.bucket.names]
            pending = self.transfer.begin(replace(job_of(handles), lengths=lengths))
            flight = Flight(tuple(handles), pending, _ignore, requests[0].operation in IN_PLACE)
            for handle in handles:
                assert not handle._done and handle.flight is None, f"{handle.name!r} runs twice"
                handle.flight = flight
            return
        first = requests[0]
        arrays = tuple(np.empty(_absent_shape(each)) for each in requests)
        job = Job(
            operation=first.operation, arrays=arrays, op=first.op, root=first.root, lengths=lengths
        )
        pending = self.transfer.begin_absent(run.bucket.names, job)
        self.awaited.append(Flight((), pending, _ignore, True))

    def _drain(self, launched: int) -> None:
        self.draining = True
        if self.plan is not None:
            self.plan.void_up_to(launched)
            self.awaited += self.plan.flights

    def _go_on(self) -> None:
        """Ends the flights (collectives in progress) for which the loop has waited. If the loop
        drains the plan, also ends the plan.
        """
        flights, self.awaited = self.awaited, []
        for flight in flights:
            flight.settle(None)
        if not self.draining:
            return
        undone = [handle for flight in flights if not flight.ran for handle in flight.handles]
        if self.plan is not None:
            undone += self.plan.unlaunched()
        self.plan, self.draining = None, False
        requests = tuple(handle.request for handle in undone if not handle._done)
        self.follow.append(mb.HasDrained(requests))

    def _lose(self, error: Exception) -> None:
        self.error = error
        for handle in self.handles.values():
            if handle.flight is None:
                handle.fail(error)


def _absent_shape(request: Request) -> tuple[int, ...]:
    return (0, *request.shape[1:]) if request.operation == "all_gather" else request.shape


def _finished(plan: FrozenPlan) -> list[mb.Event]:
    if isinstance(plan, TrialPlan) and plan.finished:
        return [mb.HasFinished(plan.epoch, plan.times())]
    return []


def _ignore(flight: Flight) -> None:
    """Does nothing when a flight (a collective in progress) ends."""
