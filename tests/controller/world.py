"""A simulated world of ranks that agree: queues of messages, a scheduler, and checks at the end."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from controller.ledger import (
    Entry,
    Ledger,
    Part,
    SimulatedPending,
    SimulatedTransfer,
    SimulatedVotedJob,
)  # fmt: skip
from controller.simulated_rank import Command, JoinAll, SimulatedRank, Submit, Wait
from unisono.controller import messages as m
from unisono.controller.agreement import State
from unisono.controller.frozen_plan import FrozenPlan, PlannedBucket, PlannedTensor
from unisono.controller.fusion.buckets import DEFAULT_FUSION_BYTES
from unisono.controller.fusion.fusion_trial import TrialClock
from unisono.controller.fusion.fusion_tuner import FusionTuner
from unisono.controller.fusion.trial_plan import TrialPlan
from unisono.controller.handle import Flight, Handle
from unisono.controller.rank_state import Mode, Received

_MOST_MOVES = 100_000

Move = tuple[str, int, int]
"""The part that moves ("program", "loop" or "queue"), a source, a destination."""


@dataclass(frozen=True)
class Sent:
    """A message, with the number of commands that each program had completed when the message was
    sent.
    """

    src: int
    dst: int
    message: m.Message
    positions: tuple[int, ...]


class World:
    """Simulated ranks, each with a program. Call `move` until `moves` is empty, then
    `require_finished`.
    """

    def __init__(
        self,
        programs: Sequence[Sequence[Command]],
        *,
        fusion_bytes: int = DEFAULT_FUSION_BYTES,
        freeze_after: int | None = None,
        wire: bool = True,
        whole_turns: bool = False,
        tuner: FusionTuner | None = None,
        now_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        """Prepares the ranks. If `wire` is true, messages pass through `encode` and `decode` and
        are kept in `sent`.

        If `whole_turns` is true, the program does not move between the actions of one turn of its
        loop. `tuner` tunes plans, and `now_ns` is the clock of its trials.
        """
        size = len(programs)
        self.now_s = 0.0
        joins = any(isinstance(each, JoinAll) for program in programs for each in program)
        self.ledger = Ledger(size, paired=not joins)
        self.sent: list[Sent] = []
        self._wire = wire
        self._whole_turns = whole_turns
        self.queues: dict[tuple[int, int], deque[tuple[m.Message, ...]]] = {}
        self.ranks: list[SimulatedRank] = []
        for rank, program in enumerate(programs):
            state = State.first(rank, size, fusion_bytes, tuner)
            if state.coordinator is not None and freeze_after is not None:
                state.coordinator.freezing.freeze_after = freeze_after
            self.ranks.append(SimulatedRank(state, program, self.ledger, now_ns))

    # ---- moves

    def moves(self) -> list[Move]:
        """Returns all moves that are possible now."""
        found: list[Move] = []
        for rank in self.ranks:
            if rank.loop_moves():
                found.append(("loop", rank.rank, rank.rank))
            if rank.program_moves():
                found.append(("program", rank.rank, rank.rank))
        found += [
            ("queue", src, dst)
            for (src, dst), queue in self.queues.items()
            if queue and self.ranks[dst].between_turns
        ]
        return found

    def move(self, move: Move) -> None:
        """Performs one of the possible moves."""
        kind, src, dst = move
        rank = self.ranks[dst]
        rank.now_s = self.now_s
        if kind == "program":
            rank.move_program()
        else:
            if kind == "queue":
                rank.take([Received(src, self.queues[src, dst].popleft())])
            else:
                rank.move_loop()
            while self._whole_turns and rank.actions and not rank.awaited:
                rank.move_loop()
        self._post(rank)

    def _post(self, rank: SimulatedRank) -> None:
        for dst, messages in rank.outbox.items():
            found = tuple(messages)
            if self._wire:
                positions = tuple(each.position for each in self.ranks)
                self.sent += [Sent(rank.rank, dst, each, positions) for each in found]
                found = m.decode(m.encode(found))
            self.queues.setdefault((rank.rank, dst), deque()).append(found)
        rank.outbox.clear()

    def run(self, choose: Callable[[list[Move]], Move]) -> World:
        """Moves until no move is possible, then requires a correct end."""
        for _ in range(_MOST_MOVES):
            moves = self.moves()
            if not moves:
                self.require_finished()
                return self
            self.move(choose(moves))
        raise AssertionError(f"no end after {_MOST_MOVES} moves: {self.describe()}")

    def run_at_random(self, seed: int) -> World:
        """Runs with random delays: some ranks and queues are faster than others."""
        chance = random.Random(seed)
        speeds: dict[Move, float] = {}

        def choose(moves: list[Move]) -> Move:
            weights = [speeds.setdefault(move, 10 ** chance.uniform(-2, 0)) for move in moves]
            return chance.choices(moves, weights)[0]

        return self.run(choose)

    # ---- checks at the end

    def require_finished(self) -> None:
        """Raises if a program waits forever, or if a tensor ran twice, never, or only on some
        ranks.
        """
        assert all(rank.finished for rank in self.ranks), f"deadlock: {self.describe()}"
        if any(isinstance(rank.error, Exception) for rank in self.ranks):
            return  # tensors that waited when the rank failed have failed too
        refusals: dict[tuple[int, str], dict[int, str]] = {}
        for rank in self.ranks:
            for submission, handle in rank.outcomes.items():
                runs = self.ledger.runs[rank.rank, submission]
                wanted = 0 if handle.exception is not None else 1
                assert runs == wanted, f"{submission} ran {runs} times on rank {rank.rank}"
                assert handle.done, f"{submission} has not ended on rank {rank.rank}"
                if handle.exception is not None:
                    key = (submission.nth, submission.name)
                    refusals.setdefault(key, {})[rank.rank] = str(handle.exception)
        for key, texts in refusals.items():
            assert len(set(texts.values())) == 1, f"{key}: refused for different reasons {texts}"
        for entry in (*self.ledger.decided, *self.ledger.voted):
            assert entry.completed, f"a job that only some ranks began: {entry}"

    def describe(self) -> str:
        """Describes what each rank waits for."""
        lines = []
        for rank in self.ranks:
            command = "nothing" if rank.finished else rank.program[rank.position]
            plan = rank.plan and (rank.plan.epoch, rank.plan.launched, rank.plan.stopped)
            undecided = list(rank.state.member.undecided)
            lines.append(f"rank {rank.rank} ({rank.state.mode}) {command=} {plan=} {undecided=}")
        return "; ".join(lines)

    def digest(self) -> int:
        """Returns a number that is equal for worlds in equal states."""
        ranks = tuple(map(_rank_digest, self.ranks))
        queues = tuple((key, tuple(self.queues[key])) for key in sorted(self.queues))
        jobs = (self.ledger.decided, self.ledger.voted)
        begun = tuple(
            tuple(tuple(sorted(each.parts.items())) for each in entries if not each.completed)
            for entries in jobs
        )
        return hash((ranks, queues, begun))

    # ---- results

    @property
    def frozen(self) -> bool:
        """True if all ranks follow a frozen plan."""
        return all(rank.state.mode is Mode.FROZEN for rank in self.ranks)

    def messages(self, kind: type[Any]) -> list[Any]:
        """Returns the sent messages of this type; a decision counts once per receiving rank."""
        return [each.message for each in self.sent if isinstance(each.message, kind)]

    def sent_after(self, positions: int) -> list[Sent]:
        """Returns the messages sent after each rank had completed `positions` commands or more."""
        return [each for each in self.sent if min(each.positions) >= positions]

    def ran(self) -> list[tuple[str, ...]]:
        """Returns the tensor names of each job that ran, in the order in which the jobs ended."""
        return [part.names for part in self.jobs()]

    def jobs(self) -> list[Part]:
        """Returns rank 0's contributions to the jobs that ran, in the order of the jobs' ends."""
        return self.ledger.finished

    def texts(self, rank: int = 0) -> dict[str, str]:
        """Returns the error texts of a rank's refused tensors, by name."""
        outcomes = self.ranks[rank].outcomes.items()
        return {key.name: str(handle.exception) for key, handle in outcomes if handle.exception}


def explore(world: World, most_states: int = 60_000) -> int:
    """Runs a world in all orders of its moves; returns the number of different states."""
    seen = {world.digest()}
    stack = [world]
    while stack:
        before = stack.pop()
        moves = before.moves()
        if not moves:
            before.require_finished()
        for move in moves:
            after = before if move is moves[-1] else clone(before, {})
            after.move(move)
            mark = after.digest()
            if mark not in seen:
                seen.add(mark)
                stack.append(after)
        assert len(seen) <= most_states, f"more than {most_states} states"
    return len(seen)


_COPIED = (
    World, SimulatedRank, SimulatedTransfer, SimulatedPending, SimulatedVotedJob, Ledger, Entry
)  # fmt: skip
_COPIED_SLOTS = (Handle, PlannedTensor, PlannedBucket, Flight)
_ATTRIBUTES = {
    **dict.fromkeys((*_COPIED, FrozenPlan, TrialPlan, TrialClock), None),
    **{kind: kind.__slots__ for kind in _COPIED_SLOTS},
}


def clone(value: Any, memo: dict[int, Any]) -> Any:
    """Returns a copy of a world. The copy shares only immutable objects with the original."""
    kind = type(value)
    if kind in (list, tuple, deque):
        return kind([clone(each, memo) for each in value])
    if kind is dict:
        return {key: clone(each, memo) for key, each in value.items()}
    if kind is Counter:
        return Counter(value)
    if kind not in _ATTRIBUTES or (kind is Entry and value.completed):
        return value
    if id(value) not in memo:
        copied = memo[id(value)] = kind.__new__(kind)
        for name in _ATTRIBUTES[kind] or value.__dict__:
            setattr(copied, name, clone(getattr(value, name), memo))
    return memo[id(value)]


def step_of(names: Sequence[str], **options: Any) -> list[Command]:
    """Returns a step of a program, which submits the tensors in order and then waits for all of
    them.
    """
    return [*(Submit(name, **options) for name in names), *(Wait(name) for name in names)]


def _rank_digest(rank: SimulatedRank) -> tuple[object, ...]:
    plan = rank.plan
    waiting = plan and tuple(each.handle is not None for each in plan.tensors.values())
    flights = plan and tuple(each._settled for each in plan.flights)
    handles = tuple(
        (name, each._done, each._error is None, each.flight is None)
        for name, each in rank.handles.items()
    )
    return (
        (rank.position, rank.begun, rank.waits, rank._broke, len(rank.stalls), rank.draining),
        (plan and (plan.epoch, plan.launched, plan.stopped), waiting, flights, handles),
        (tuple(rank.events), tuple(rank.follow), tuple(rank.actions), len(rank.awaited)),
        (rank.last_joined, rank.error is None),
        _plain(rank.state),
    )


def _plain(value: Any) -> object:
    """Returns a hashable value that represents a value that is not hashable."""
    if isinstance(value, dict):
        return tuple((key, _plain(each)) for key, each in value.items())
    if isinstance(value, set):
        return frozenset(value)
    if (is_dataclass(value) and type(value).__hash__ is None) or isinstance(value, State):
        return tuple(_plain(getattr(value, each.name)) for each in fields(value))
    return value
