"""The recovery agreement, as a pure function: determines which ranks form the new group after a
failure.

Each rank holds an `AgreementState`. `step` takes the state and an event, and returns the next state
and the actions to take. The function uses no sockets, no clock and no threads. Its caller sends the
messages, detects dead ranks, and forms groups.

A rank is *out* if it is dead or does not answer in time. A rank that is out stays out, and every
message lists the ranks that are out. The lowest rank that is not out is the leader, and the others
report to the leader. So each new leader has a higher rank than the previous leader. When all ranks
that are not out have reported since the leader's last order, the leader gives the next order. This
order is to form a group of these ranks or, if all of them have just formed this group, to use it.
If a rank is out later, the leader gives a new order.

The ledger makes the decision unique. It is one word that all ranks can read, and it changes only by
compare-and-exchange. It holds a ballot's number and whether the ballot is decided. A leader writes
each order to the ledger before it gives the order. A live leader that others consider lost finds
the word changed and can decide nothing. So all ranks of the new group have formed the same ballot,
even if some ranks were wrongly considered lost.

Across hosts, votes of the hosts replace the word in memory (`recovery/cross_host_transport.py`).
Across hosts, a rank may read an old value, but never a decision that was not made. Each change
still succeeds on one rank only.

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
"""Seconds within which a rank that takes part answers, unless it is stopped."""

_NOBODY: Final = -1


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """The arrival of a message from `source`."""

    source: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A periodic observation: the ranks that are dead or permanently unreachable, and the ledger's
    value. The caller makes one about every 10 ms."""

    gone: frozenset[int]
    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """The end of a `Form`: `good` is True if the ballot's group was formed on all its members,
    including this rank."""

    ballot: int
    good: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Advanced:
    """The result of an `Advance`: `seen` is the ledger's previous value."""

    expected: int
    desired: int
    seen: int


Event: TypeAlias = MessageReceived | Observation | Formed | Advanced


# ---- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """Send `message` to rank `to`. The message may arrive late, or never if the rank is dead."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Set the ledger to `desired` if it equals `expected`, then report `Advanced`."""

    expected: int
    desired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Close any group formed earlier, form a group of these ranks, then report `Formed`."""

    ballot: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the recovery: the group that was formed last is the new group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """End the recovery without a group: the other ranks form the group without this rank."""


Action: TypeAlias = SendMessage | Advance | Form | Finish | GiveUp
Actions: TypeAlias = tuple[Action, ...]


# ---- a rank's state


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementState:
    """The agreement's state on one rank. `ready` is the ballot whose group the rank has formed, 0
    if none.
    """

    rank: int
    ranks: int
    timeout_s: float
    deadline: float
    """Time until which this rank waits for reports if it is the leader, else for the leader."""
    out: frozenset[int]
    gone: frozenset[int] = frozenset()
    """Ranks that are out because they are dead or permanently unreachable."""
    late: frozenset[int] = frozenset()
    """Ranks that are out because they did not answer this rank in time."""
    leader: int = _NOBODY
    has_reported: bool = False
    reports: Mapping[int, int] = field(default_factory=dict)
    """On the leader, the ballot whose group each rank has formed (0: none), for the ranks that have
    reported since the most recent `FormOrder`.
    """
    entry: int = 0
    yields_until: float = 0.0
    """On the leader, time until which it does not write the ledger, since a lower rank also leads
    and goes first.
    """
    members: tuple[int, ...] = ()
    """Members in the most recent `FormOrder`. If a group is ready, these are its members."""
    proposed: tuple[int, ...] = ()
    """On the leader, members that its next `FormOrder` names. The leader sends this order after it
    has written the ledger.
    """
    ready: int = 0
    is_busy: bool = False
    """True while an `Advance` or a `Form` is in progress."""
    has_ended: bool = False

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that are not out (dead, unreachable or too late)."""
        return tuple(rank for rank in range(self.ranks) if rank not in self.out)


def begin(
    *,
    rank: int,
    ranks: int,
    timeout_s: float,
    now: float,
    exclude: frozenset[int] = frozenset(),
) -> AgreementState:
    """Returns the initial state of a rank. The ranks in `exclude` are out from the start."""
    return AgreementState(
        rank=rank, ranks=ranks, timeout_s=timeout_s, deadline=now + timeout_s, out=exclude
    )


def decided(entry: int) -> bool:
    """Returns True if the ledger's word is a decision."""
    return entry % 2 == 1


def undecided(ballot: int) -> int:
    """Returns the ledger's word while a ballot (a numbered attempt to form a group) is in progress.

    >>> undecided(3), decided(undecided(3)), decided(undecided(3) + 1)
    (6, False, True)
    """
    return 2 * ballot


def step(state: AgreementState, event: Event, now: float) -> tuple[AgreementState, Actions]:
    """Returns the state after an event, and the actions to take, in order."""
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
        # Messages of a rank that is out have no effect. But the rank must learn that it is out,
        # else it would form a group by itself. A `Hold` gets no answer: two ranks that consider
        # each other lost would answer each other forever.
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
    # A follower waits longer than the leader would: this rank may have failed to form the group at
    # once, while the leader is still trying.
    patience_s = ANSWER_S if state.leader == state.rank else state.timeout_s + ANSWER_S
    return replace(
        state,
        ready=formed.ballot if formed.good else 0,
        is_busy=False,
        has_reported=False,
        deadline=now + patience_s,
    )


def _read(state: AgreementState, entry: int, now: float) -> AgreementState:
    """Updates the state from the ledger's value. If two leaders consider each other lost, the lower
    rank goes first.

    The value may be older than this rank's last write to the ledger, so a number that is not higher
    is ignored. A decision may have a lower number: a later ballot may have found the decision of an
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


# ---- actions that follow from the state


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
    """Determines the current leader. A rank that becomes the leader tells all ranks, including
    ranks that it considers lost."""
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
    """Begins the next order, if all ranks have reported since the previous order."""
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
        # Choose a ballot number that is greater than all earlier numbers and that no other rank can
        # choose.
        latest = state.entry // 2
        desired = undecided((latest // state.ranks + 1) * state.ranks + state.rank)
    state = replace(state, proposed=state.live, is_busy=True)
    return state, (Advance(expected=state.entry, desired=desired),)


def _hold(state: AgreementState, to: int, now: float) -> SendMessage:
    return SendMessage(to=to, message=Hold(out=state.out, left_s=max(state.deadline - now, 0.0)))
