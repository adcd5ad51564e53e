"""The agreement of all ranks on the next collectives, as a pure function.

Each rank has a `State`. An event gives a new state and actions. Rank 0 also has the coordinator,
and sends no messages to itself. This module uses no network, clock or thread, so tests can run any
order of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.controller import messages as m
from unisono.controller.coordinator import Coordinator
from unisono.controller.fusion.buckets import DEFAULT_FUSION_BYTES
from unisono.controller.fusion.fusion_tuner import FusionTuner
from unisono.controller.rank_state import Action, Event, Member, Mode, Received, Send


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of one rank. Only rank 0 has a coordinator, which decides for all ranks. Immutable:
    `step` returns a new state.
    """

    size: int
    member: Member
    coordinator: Coordinator | None

    @property
    def mode(self) -> Mode:
        """The present mode of this rank: negotiate, follow a frozen plan, or leave it."""
        return self.member.mode

    @staticmethod
    def first(
        rank: int,
        size: int,
        fusion_bytes: int = DEFAULT_FUSION_BYTES,
        tuner: FusionTuner | None = None,
    ) -> State:
        """Returns the state before the first event. Without a `tuner`, buckets are not tuned."""
        coordinator = None
        if rank == 0:
            coordinator = Coordinator(size=size, fusion_bytes=fusion_bytes, tuner=tuner)
        return State(size=size, member=Member(rank=rank), coordinator=coordinator)


def step(
    state: State, events: Sequence[Event], now_s: float = 0.0
) -> tuple[State, tuple[Action, ...]]:
    """Returns the state after `events`, and the actions that the rank must then execute, in order.

    `now_s` is the time of the events in seconds, from any starting point.

    >>> from unisono.controller.rank_state import Submitted
    >>> from unisono.controller.request import Request
    >>> from unisono.types import DType
    >>> w = Request(name="w", operation="all_reduce", dtype=DType.FLOAT32, shape=(3,))
    >>> state, actions = step(State.first(rank=0, size=1), [Submitted((w,))])
    >>> [type(action).__name__ for action in actions], actions[0].bucket.names
    (['Run'], ('w',))
    """
    coordinator = None if state.coordinator is None else state.coordinator.copy()
    turn = _Turn(state.size, state.member.copy(), coordinator, now_s)
    for event in events:
        turn.take(event)
    after = State(size=state.size, member=turn.member, coordinator=turn.coordinator)
    return after, tuple(turn.actions)


class _Turn:
    """One call of `step`: the state that events change, and the resulting actions."""

    def __init__(
        self, size: int, member: Member, coordinator: Coordinator | None, now_s: float
    ) -> None:
        self.size = size
        self.member = member
        self.coordinator = coordinator
        self.now_s = now_s
        self.actions: list[Action] = []

    def take(self, event: Event) -> None:
        if not isinstance(event, Received):
            self._act(self.member.take(event))
            return
        for message in event.messages:
            if self.coordinator is not None:
                self._coordinate(self.coordinator, event.source, message)
            else:
                self._act(self.member.receive(message))

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if self.coordinator is not None and isinstance(action, Send):
                self._coordinate(self.coordinator, self.member.rank, action.message)
            else:
                self.actions.append(action)

    def _coordinate(self, coordinator: Coordinator, source: int, message: m.Message) -> None:
        for decision in coordinator.receive(source, message, self.now_s):
            self.actions += [Send(dst, decision) for dst in range(1, self.size)]
            self._act(self.member.receive(decision))
