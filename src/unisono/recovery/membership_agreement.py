"""The recovery agreement: which ranks form the new group after a failure, as a pure function.

Each rank holds an `AgreementState`. `step` takes the state and an event, and returns the next state
and the actions to take. The function uses no sockets, no clock and no threads. Its caller sends the
messages, detects dead ranks, and forms groups.

The lowest rank that is not out leads, and the others report to it. When all ranks that are not out
have reported since its last order, it gives the next order. The order is to form a group of these
ranks or, if all have just formed this group, to use it. A dead rank is out, and the leader then
asks again. A rank that does not answer in time is out, too. A rank that is out stays out, and every
message says which ranks are out. So the ranks that lead one after another are in rising order.

The ledger makes the decision unique. It is one word that all ranks can read, and it changes only by
compare-and-exchange. It holds a ballot's number and whether the ballot is decided. A leader enters
each order there before giving it. A live leader that others think lost finds the word changed and
can decide nothing. So all ranks of the new group have formed the same ballot, whichever ranks were
wrongly thought lost.

Across hosts, votes of the hosts replace the word in memory (`recovery/cross_host_transport.py`).
There, a rank may read an old value, but never a decision that was not made. Each change still
succeeds on one rank only.

This is a two-phase commit with a change of coordinator, whose decision is in shared memory as in
Lamport, Paxos Made Simple (2001), section 2. Its purpose is that of MPI_Comm_shrink in User Level
Failure Mitigation (Bland et al., IJHPCA 27(3), 2013).

>>> state = begin(rank=0, ranks=2, timeout_s=5.0, now=0.0)
>>> state, todo = step(state, Observation(gone=frozenset({1}), entry=0), now=0.1)
>>> todo
(Advance(expected=0, desired=4),)
>>> state, todo = step(state, Advanced(expected=0, desired=4, seen=0), now=0.1)
>>> todo
(Form(ballot=2, members=(0,)),)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from unisono.recovery.recovery_messages import FormOrder, Go, Hold, Message, StatusReport

ANSWER_S: Final = 3.0
"""A rank that takes part answers within this time, unless it is stopped."""

_NOBODY: Final = -1


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """A message arrived from `source`."""

    source: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Periodic observation: ranks that are dead or out of reach for ever, and the ledger's value.
    Due about every 10 ms."""

    gone: frozenset[int]
    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """The group of a ballot is formed here and on all its members (`good`), or could not be
    formed."""

    ballot: int
    good: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Advanced:
    """The result of `Advance`: the ledger's previous value."""

    expected: int
    desired: int
    seen: int


Event: TypeAlias = MessageReceived | Observation | Formed | Advanced


# ---- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """Send `message` to `to`. It may arrive late, or never if that rank is dead."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Move the ledger from `expected` to `desired` if it equals `expected`; report `Advanced`."""

    expected: int
    desired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Form a group of these ranks, dropping any earlier one; report `Formed`."""

    ballot: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The decision is made: the group formed last is the new group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The others form the group without this rank."""


Action: TypeAlias = SendMessage | Advance | Form | Finish | GiveUp
Actions: TypeAlias = tuple[Action, ...]


# ---- a rank's state


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementState:
    """Knowledge of one rank. `ready` is the ballot whose group it has formed, 0 if none."""

    rank: int
    ranks: int
    timeout_s: float
    deadline: float
    """End of this rank's wait: for reports if it leads, else for the leader."""
    out: frozenset[int]
    gone: frozenset[int] = frozenset()
    """Ranks that are out because they are dead or out of reach for ever."""
    late: frozenset[int] = frozenset()
    """Ranks that are out because this rank found them late."""
    leader: int = _NOBODY
    has_reported: bool = False
    reports: Mapping[int, int] = field(default_factory=dict)
    """If this rank leads: the ready ballot of each rank that has reported since the last order."""
    entry: int = 0
    yields_until: float = 0.0
    """If this rank leads: until this time it leaves the ledger to a lower rank that leads, too."""
    members: tuple[int, ...] = ()
    """Members of the last order; those of the ready group, if there is one."""
    proposed: tuple[int, ...] = ()
    """If this rank leads: members of the order to give if the ledger can be moved."""
    ready: int = 0
    is_busy: bool = False
    """An `Advance` or a `Form` is in progress."""
    has_ended: bool = False

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that are not out."""
        return tuple(rank for rank in range(self.ranks) if rank not in self.out)


def begin(
    *,
    rank: int,
    ranks: int,
    timeout_s: float,
    now: float,
    exclude: frozenset[int] = frozenset(),
) -> AgreementState:
    """Returns the initial state of a rank. `exclude`: ranks that are out from the start."""
    return AgreementState(
        rank=rank, ranks=ranks, timeout_s=timeout_s, deadline=now + timeout_s, out=exclude
    )


def decided(entry: int) -> bool:
    """Returns whether the ledger's word is a decision."""
    return entry % 2 == 1


def undecided(ballot: int) -> int:
    """Returns the ledger's word while a ballot is in progress.

    >>> undecided(3), decided(undecided(3)), decided(undecided(3) + 1)
    (6, False, True)
    """
    return 2 * ballot


def step(state: AgreementState, event: Event, now: float) -> tuple[AgreementState, Actions]:
    """Returns the next state, and the actions in order."""
    if state.has_ended:
        return state, ()
    match event:
        case MessageReceived():
            state, first = _receive(state, event.source, event.message, now)
        case Observation():
            state, first = _observe(state, event, now), ()
        case Formed():
            state, first = _formed(state, event, now), ()
        case Advanced():
            state, first = _advanced(state, event, now)
    state, then = _next_actions(state, now)
    return state, (*first, *then)


# ---- state changes by event


def _receive(
    state: AgreementState, source: int, message: Message, now: float
) -> tuple[AgreementState, Actions]:
    if source in state.out:
        # Messages of a rank that is out do not count. But the rank must learn that it is out, else
        # it would form a group by itself. A `Hold` gets no answer: two ranks that think each other
        # lost would never stop.
        answers = () if isinstance(message, Hold) else (_hold(state, source, now),)
        return state, answers
    state = replace(state, out=state.out | message.out)
    if state.rank in state.out or (state.is_busy and not isinstance(message, StatusReport)):
        return state, ()
    state, first = _follow(state, now)
    match message:
        case StatusReport() if state.leader == state.rank:
            state = replace(state, reports={**state.reports, source: message.ready})
            return state, (*first, _hold(state, source, now))
        case Hold() if state.leader == source:
            patience_s = min(message.left_s, state.timeout_s) + ANSWER_S
            return replace(state, deadline=max(state.deadline, now + patience_s)), first
        case FormOrder() if state.leader == source and state.rank in message.members:
            ordered = replace(state, members=message.members, ready=0, is_busy=True)
            return ordered, (*first, Form(ballot=message.ballot, members=message.members))
    return state, first


def _observe(state: AgreementState, seen: Observation, now: float) -> AgreementState:
    gone = seen.gone - {state.rank}
    state = replace(state, out=state.out | gone, gone=state.gone | gone)
    state = _read(state, seen.entry, now)
    if state.is_busy or now < state.deadline or state.leader == _NOBODY:
        return state
    if state.leader == state.rank:
        missing = frozenset(state.live) - {state.rank} - state.reports.keys()
    else:
        missing = frozenset({state.leader}) - state.out
    return replace(state, out=state.out | missing, late=state.late | missing)


def _formed(state: AgreementState, formed: Formed, now: float) -> AgreementState:
    # A follower waits longer: a group that failed here at once may still be forming on the leader.
    patience_s = ANSWER_S if state.leader == state.rank else state.timeout_s + ANSWER_S
    return replace(
        state,
        ready=formed.ballot if formed.good else 0,
        is_busy=False,
        has_reported=False,
        deadline=now + patience_s,
    )


def _read(state: AgreementState, entry: int, now: float) -> AgreementState:
    """Takes note of the ledger's value. Of two leaders that think each other lost, the lower goes
    first.

    The value may be old, read before this rank moved the ledger, so a number that is not higher is
    ignored. A decision may have a lower number: a later ballot may have found the decision of an
    earlier one.
    """
    if entry == state.entry or (entry < state.entry and not decided(entry)):
        return state
    writer = entry // 2 % state.ranks
    is_lower = writer < state.rank and writer not in state.gone
    return replace(state, entry=entry, yields_until=now + ANSWER_S if is_lower else 0.0)


def _advanced(
    state: AgreementState, advanced: Advanced, now: float
) -> tuple[AgreementState, Actions]:
    if advanced.seen != advanced.expected:
        return _read(replace(state, is_busy=False), advanced.seen, now), ()
    others = [rank for rank in state.proposed if rank != state.rank]
    if decided(advanced.desired):
        go = Go(out=state.out, ballot=state.ready)
        sends = tuple(SendMessage(to=rank, message=go) for rank in others)
        return replace(state, entry=advanced.desired, has_ended=True), (*sends, Finish())
    ballot = advanced.desired // 2
    order = FormOrder(out=state.out, ballot=ballot, members=state.proposed)
    sends = tuple(SendMessage(to=rank, message=order) for rank in others)
    state = replace(state, entry=advanced.desired, reports={}, ready=0, members=state.proposed)
    return state, (*sends, Form(ballot=ballot, members=state.members))


# ---- consequences of the state


def _next_actions(state: AgreementState, now: float) -> tuple[AgreementState, Actions]:
    if state.has_ended or state.is_busy:
        return state, ()
    if decided(state.entry) and state.ready and state.entry == undecided(state.ready) + 1:
        return replace(state, has_ended=True), (Finish(),)
    if decided(state.entry) or state.rank in state.out:
        return replace(state, has_ended=True), (GiveUp(),)
    state, first = _follow(state, now)
    if state.leader != state.rank:
        if state.has_reported:
            return state, first
        report = SendMessage(
            to=state.leader, message=StatusReport(out=state.out, ready=state.ready)
        )
        return replace(state, has_reported=True), (*first, report)
    state, then = _lead(state, now)
    return state, (*first, *then)


def _follow(state: AgreementState, now: float) -> tuple[AgreementState, Actions]:
    """Determines the current leader. A rank that takes over tells all ranks, even those it thinks
    lost."""
    leader = state.live[0]
    if leader == state.leader:
        return state, ()
    is_first = state.leader == _NOBODY
    deadline = state.deadline if is_first else max(state.deadline, now + ANSWER_S)
    state = replace(state, leader=leader, deadline=deadline, has_reported=False)
    if is_first or leader != state.rank:
        return state, ()
    others = (rank for rank in range(state.ranks) if rank != state.rank)
    return state, tuple(_hold(state, rank, now) for rank in others)


def _lead(state: AgreementState, now: float) -> tuple[AgreementState, Actions]:
    """Gives the next order, if all have reported since the last one."""
    others = [rank for rank in state.live if rank != state.rank]
    if not all(rank in state.reports for rank in others):
        return state, ()
    if now < state.yields_until and state.entry // 2 % state.ranks not in state.gone:
        return state, ()
    is_formed = (
        state.ready and state.entry == undecided(state.ready) and state.members == state.live
    )
    if is_formed and all(state.reports[rank] == state.ready for rank in others):
        desired = state.entry + 1
    else:
        # Greater than any earlier number, and not a number of another rank.
        latest = state.entry // 2
        desired = undecided((latest // state.ranks + 1) * state.ranks + state.rank)
    state = replace(state, proposed=state.live, is_busy=True)
    return state, (Advance(expected=state.entry, desired=desired),)


def _hold(state: AgreementState, to: int, now: float) -> SendMessage:
    return SendMessage(to=to, message=Hold(out=state.out, left_s=max(state.deadline - now, 0.0)))
