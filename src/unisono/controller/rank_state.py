"""One rank's part of the agreement: its messages to rank 0, and its actions after rank 0's
decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from unisono.controller import messages as m
from unisono.controller.fusion.buckets import Bucket
from unisono.controller.fusion.fusion_trial import PassTimes, Trial
from unisono.controller.request import Request


class Mode(StrEnum):
    """The present mode of a rank: negotiate, follow a frozen plan, or change between the two."""

    TALKING = "talking"
    FROZEN = "frozen"
    FINISHED = "finished"
    """The rank has launched all passes of a trial. Tensors of the plan wait for the next plan."""
    STOPPING = "stopping"
    """The rank has left the frozen plan. Its tensors wait until all ranks have left."""


# ---- events: what happens to a rank


@dataclass(frozen=True, slots=True)
class Submitted:
    """The program has submitted tensors while there was no frozen plan, or tensors that do not fit
    the plan.
    """

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """Messages of another rank have arrived."""

    source: int
    messages: tuple[m.Message, ...]


@dataclass(frozen=True, slots=True)
class CannotFollow:
    """The program departs from the frozen plan of this epoch. Each change of the plan begins an
    epoch.
    """

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class HasStopped:
    """The rank has stopped following the plan after it launched this many buckets."""

    launched: int


@dataclass(frozen=True, slots=True)
class HasDrained:
    """All launched buckets have ended. The tensors `undone` did not run: they were in a bucket that
    was not launched or that ran on no rank.
    """

    undone: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class HasFinished:
    """The rank has launched all passes of the trial of this epoch."""

    epoch: int
    times: PassTimes


@dataclass(frozen=True, slots=True)
class WantsJoin:
    """The program has called `join`, because it has no more tensors."""

    average_over_all: bool


@dataclass(frozen=True, slots=True)
class WantsStalls:
    """The program asks which tensors wait, and for which ranks."""


@dataclass(frozen=True, slots=True)
class Closes:
    """The program closes its controller."""


Event: TypeAlias = (
    Submitted
    | Received
    | CannotFollow
    | HasStopped
    | HasDrained
    | HasFinished
    | WantsJoin
    | WantsStalls
    | Closes
)

# ---- actions that a rank executes. Some messages, such as `Run` and `Refuse`, are also actions.


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to rank `dst`."""

    dst: int
    message: m.Message


@dataclass(frozen=True, slots=True)
class Adopt:
    """Follow this plan. The tensors `carried` are already submitted and fit the plan.

    The rank adds them to the tensors that wait in a finished trial.
    """

    epoch: int
    buckets: tuple[Bucket, ...]
    carried: tuple[str, ...]
    trial: Trial | None = None


@dataclass(frozen=True, slots=True)
class EnterPlan:
    """Add these tensors to the plan. They fit the plan, and were submitted while the rank adopted
    it.
    """

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopPlan:
    """Launch no more buckets of the plan, then report `HasStopped`."""

    reason: str


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """Launch void buckets, which run on no rank, until the plan has launched this many buckets.
    Wait for all buckets, then report `HasDrained`.
    """

    launched: int


Action: TypeAlias = (
    Send
    | Adopt
    | EnterPlan
    | StopPlan
    | DrainPlan
    | m.Run
    | m.Refuse
    | m.Tuned
    | m.Joined
    | m.Left
    | m.Stalls
)


@dataclass(slots=True, kw_only=True)
class Member:
    """State of one rank. `take` returns the actions that follow from an event, in order."""

    rank: int
    mode: Mode = Mode.TALKING
    epoch: int = 0
    undecided: dict[str, Request] = field(default_factory=dict)
    """The tensors that this rank has submitted and rank 0 has not decided on."""
    planned: Mapping[str, Request] = field(default_factory=dict)
    """The tensors of the frozen plan; never changed in place."""
    joins: m.Join | None = None
    broke: bool = False
    """This rank has already asked to leave the plan."""

    def copy(self) -> Member:
        """Returns a copy that shares no mutable state."""
        return replace(self, undecided=dict(self.undecided))

    def take(self, event: Event) -> list[Action]:
        """Processes an event that is not a message."""
        match event:
            case Submitted():
                return self._submit(event.requests)
            case CannotFollow() if event.epoch == self.epoch:
                return self._break(event.reason)
            case HasStopped():
                return [self._tell(m.Stopped(self.epoch, event.launched))]
            case HasDrained():
                return self._talk_again(event.undone)
            case HasFinished() if event.epoch == self.epoch and self.mode is Mode.FROZEN:
                self.mode = Mode.FINISHED
                return [self._tell(m.Finished(self.epoch, event.times))]
            case WantsJoin():
                self.joins = m.Join(self.epoch, event.average_over_all)
                return self._announce_join()
            case WantsStalls():
                return [self._tell(m.AskStalls())]
            case Closes():
                return [self._tell(m.Leave())]
        return []

    def receive(self, message: m.Message) -> list[Action]:
        """Processes a decision of rank 0."""
        match message:
            case m.Run():
                for name in message.bucket.names:
                    self.undecided.pop(name, None)
                return [message]
            case m.Refuse():
                self.undecided.pop(message.name, None)
                return [message]
            case m.Freeze():
                return self._freeze(message)
            case m.Thaw():
                self.mode, self.epoch = Mode.STOPPING, message.epoch
                return [StopPlan(message.reason)]
            case m.Resume():
                return [DrainPlan(message.launched)]
            case m.Joined():
                self.joins = None
                return [message]
            case m.Left() | m.Stalls() | m.Tuned():
                return [message]
        return []

    def _submit(self, requests: Iterable[Request]) -> list[Action]:
        found = {request.name: request for request in requests}
        fitting = self._fitting(found) if self.mode is Mode.FROZEN else ()
        for name in fitting:
            del found[name]
        self.undecided |= found
        actions: list[Action] = [EnterPlan(fitting)] if fitting else []
        told = tuple(each for name, each in found.items() if not self._is_held(name))
        if told:
            actions.append(self._tell(m.Announce(self.epoch, told)))
        return [*actions, *self._break_for_changed()]

    def _is_held(self, name: str) -> bool:
        """Returns True if the rank announces a newly submitted tensor to rank 0 only after the end
        of the current plan.
        """
        if self.mode is Mode.FINISHED:
            return name in self.planned
        return self.mode is Mode.STOPPING

    def _freeze(self, message: m.Freeze) -> list[Action]:
        self.mode, self.epoch, self.broke = Mode.FROZEN, message.epoch, False
        self.planned = {each.name: each for bucket in message.buckets for each in bucket.requests}
        carried = self._fitting(self.undecided)
        for name in carried:
            del self.undecided[name]
        actions: list[Action] = [Adopt(message.epoch, message.buckets, carried, message.trial)]
        return [*actions, *self._announce_again(), *self._break_for_changed()]

    def _fitting(self, requests: Mapping[str, Request]) -> tuple[str, ...]:
        planned = self.planned
        return tuple(
            name
            for name, request in requests.items()
            if name in planned and request.repeats(planned[name])
        )

    def _break_for_changed(self) -> list[Action]:
        if self.mode is Mode.FINISHED:
            return []
        changed = next((name for name in self.undecided if name in self.planned), None)
        return [] if changed is None else self._break(f"{changed!r} has changed")

    def _break(self, reason: str) -> list[Action]:
        if self.mode not in (Mode.FROZEN, Mode.FINISHED) or self.broke:
            return []
        self.broke = True
        return [self._tell(m.Break(self.epoch, reason))]

    def _talk_again(self, undone: tuple[Request, ...]) -> list[Action]:
        self.mode = Mode.TALKING
        self.undecided = {request.name: request for request in undone} | self.undecided
        return self._announce_again()

    def _announce_again(self) -> list[Action]:
        actions: list[Action] = []
        if self.undecided:
            requests = tuple(self.undecided.values())
            actions.append(self._tell(m.Announce(self.epoch, requests)))
        return [*actions, *self._announce_join()]

    def _announce_join(self) -> list[Action]:
        if self.joins is None or self.mode is Mode.STOPPING:
            return []
        if self.mode in (Mode.FROZEN, Mode.FINISHED):
            return self._break("a rank joins")
        return [self._tell(m.Join(self.epoch, self.joins.average_over_all))]

    def _tell(self, message: m.Message) -> Send:
        return Send(0, message)
