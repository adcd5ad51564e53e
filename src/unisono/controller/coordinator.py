"""The coordinator on rank 0: tracks the tensors that each rank has submitted, and decides what all
ranks do.

While the ranks negotiate, the coordinator records the tensors of each step (an iteration of the
program). When steps repeat (`plan_freezing.py`), it sends a frozen plan, which the ranks then
follow without messages. A rank that cannot follow the plan asks to leave it. All ranks then leave
the plan at the same bucket and negotiate again.

With a tuner, a plan may be a trial of limited length. At the end of a trial, all ranks are at the
same bucket. They report their measurements and receive the next plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf

from unisono.controller import messages as m
from unisono.controller.fusion.buckets import DEFAULT_FUSION_BYTES, buckets_of
from unisono.controller.fusion.fusion_trial import PassTimes
from unisono.controller.fusion.fusion_tuner import FusionTuner, NextPlan
from unisono.controller.plan_freezing import PlanFreezing
from unisono.controller.request import Request, disagreement, ranks_text

_ANY_LENGTH = -1


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """Rank 0's record of all ranks. `receive` returns the messages that rank 0 must then send to
    all ranks, in order.
    """

    size: int
    fusion_bytes: int = DEFAULT_FUSION_BYTES
    epoch: int = 0
    frozen: bool = False
    stopping: bool = False
    table: dict[str, dict[int, Request]] = field(default_factory=dict)
    """For each undecided tensor, the request of each rank that has submitted it. The inner
    dictionaries are replaced, never changed, so copies of the coordinator may share them."""
    since_s: dict[str, float] = field(default_factory=dict)
    stopped: dict[int, int] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    average_over_all: bool = True
    freezing: PlanFreezing = field(default_factory=PlanFreezing)
    plan_buckets: int = 0
    tuner: FusionTuner | None = None
    finished: dict[int, PassTimes] = field(default_factory=dict)
    """Measurements of the ranks that have finished the current trial (a plan of limited length)."""
    trials: int = 0
    """Number of trials that all ranks have finished since the ranks last negotiated about
    tensors."""

    def copy(self) -> Coordinator:
        """Returns a copy that shares no mutable state."""
        return replace(
            self,
            table=dict(self.table),
            since_s=dict(self.since_s),
            stopped=dict(self.stopped),
            joined=set(self.joined),
            left=set(self.left),
            freezing=self.freezing.copy(),
            finished=dict(self.finished),
        )

    def receive(self, source: int, message: m.Message, now_s: float) -> list[m.Message]:
        """Processes a message of rank `source`. Returns the resulting decisions."""
        match message:
            case m.Announce() if self._is_current(message.epoch):
                for request in message.requests:
                    others = self.table.get(request.name, {})
                    self.table[request.name] = {**others, source: request}
                    self.since_s.setdefault(request.name, now_s)
                return self._decide(_with_groups(message.requests))
            case m.Join() if self._is_current(message.epoch):
                return self._join(source, message.average_over_all)
            case m.Break() if message.epoch == self.epoch and self.frozen:
                return self._thaw(message.reason)
            case m.Stopped() if message.epoch == self.epoch and self.stopping:
                self.stopped[source] = message.launched
                return self._resume()
            case m.Finished() if message.epoch == self.epoch and self.frozen:
                self.finished[source] = message.times
                return self._finish_trial()
            case m.Leave():
                self.left.add(source)
                return [m.Left(source), *(self._resume() if self.stopping else [])]
            case m.AskStalls():
                return [m.Stalls(self._stalls(now_s))]
        # The message was sent before the plan last changed. Its sender announces the tensors again.
        return []

    def _is_current(self, epoch: int) -> bool:
        return epoch == self.epoch and not self.stopping

    # ---- decisions

    def _decide(self, names: Iterable[str]) -> list[m.Message]:
        """Returns the decisions to run or refuse each tensor of `names` that is ready, and the
        decision to begin or end a frozen plan, if any.
        """
        ready = self._ready(names)
        if not ready:
            return []
        waiting = self.table.keys() - set(ready)
        if not self.frozen and self.freezing.has_ended(ready, waiting):
            frozen = self._end_step()
            if frozen:
                return frozen
        refusals = self._refusals(ready)
        decided: list[m.Message] = [m.Refuse(name, text) for name, text in refusals.items()]
        agreed = {name: _merged(self.table[name]) for name in ready if name not in refusals}
        decided += self._runs(agreed)
        phases = {
            name: {rank: each.phase for rank, each in self.table[name].items()} for name in agreed
        }
        self.freezing.add(agreed, phases)
        for name in ready:
            del self.table[name], self.since_s[name]
        beside = [name for name in agreed if not _is_uneven(agreed[name])]
        if self.frozen and self.freezing.add_side_runs(beside):
            decided += self._thaw("tensors outside of the plan recur")
        return decided

    def _runs(self, agreed: dict[str, Request]) -> list[m.Message]:
        shares: dict[tuple[int, ...], list[Request]] = {}  # key: the ranks that have the tensors
        for name, request in agreed.items():
            shares.setdefault(tuple(sorted(self.table[name])), []).append(request)
        return [
            m.Run(bucket, active, self.average_over_all, self._lengths(bucket.requests[0]))
            for active, requests in shares.items()
            for bucket in buckets_of(requests, self.fusion_bytes)
        ]

    def _ready(self, names: Iterable[str]) -> list[str]:
        """Returns the tensors of `names` that all ranks have submitted, except ranks that called
        `join`.

        A tensor of a group is ready only if all tensors of its group are ready.
        """
        here = {name for name in names if self._is_everywhere(name)}
        return [
            name
            for name in names
            if name in here and here.issuperset(next(iter(self.table[name].values())).group)
        ]

    def _is_everywhere(self, name: str) -> bool:
        requests = self.table.get(name, {})
        if len(requests) == self.size:
            return True
        return bool(requests) and len(requests.keys() | self.joined) == self.size

    def _refusals(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the reason for each tensor that must not run.

        If one tensor of a group is refused, all tensors of the group are refused.
        """
        own = {name: text for name in names if (text := self._refusal(name)) is not None}
        refused = dict(own)
        for name, text in own.items():
            for request in self.table[name].values():
                for other in request.group:
                    refused.setdefault(other, f"tensor {other!r} is in a group, of which {text}")
        return {name: refused[name] for name in names if name in refused}

    def _refusal(self, name: str) -> str | None:
        requests = self.table[name]
        text = disagreement(requests)
        if text is not None:
            return text
        absent = sorted(self.joined - requests.keys())
        return _refused_by_join(next(iter(requests.values())), absent)

    def _lengths(self, request: Request) -> tuple[int, ...]:
        if request.operation != "all_gather":
            return ()
        requests = self.table[request.name]
        return tuple(
            (requests[rank].shape or (1,))[0] if rank in requests else 0
            for rank in range(self.size)
        )

    # ---- joining

    def _join(self, rank: int, average_over_all: bool) -> list[m.Message]:
        if not self.joined:
            self.average_over_all = average_over_all
        self.joined.add(rank)
        self.freezing.interrupt()
        decided = self._decide(tuple(self.table))
        if len(self.joined) < self.size:
            return decided
        self.joined.clear()
        self.average_over_all = True
        self.freezing.forget()
        return [*decided, m.Joined(self.epoch, rank)]

    # ---- the frozen plan

    def _end_step(self) -> list[m.Message]:
        repeated = self.freezing.end_step()
        if self.joined:
            return []
        planned = (each for each in repeated if not _is_uneven(each))
        buckets = buckets_of(planned, self.fusion_bytes)
        if not buckets:
            return []
        self.freezing.begin_plan()
        self.trials = 0
        plan = NextPlan(buckets=buckets)
        if self.tuner is not None:
            self.tuner, plan = self.tuner.freeze(buckets)
        return self._freeze(plan)

    def _freeze(self, plan: NextPlan) -> list[m.Message]:
        self.epoch += 1
        self.frozen, self.plan_buckets = True, len(plan.buckets)
        # Rank 0 can forget the waiting tensors, because each rank now adds its tensors to the plan
        # or announces them again.
        self.table.clear()
        self.since_s.clear()
        self.finished.clear()
        report = [] if plan.report is None else [m.Tuned(plan.report)]
        return [*report, m.Freeze(self.epoch, plan.buckets, plan.trial)]

    def _finish_trial(self) -> list[m.Message]:
        if self.tuner is None or len(self.finished) < self.size:
            return []
        self.trials += 1
        times = [self.finished[rank] for rank in range(self.size)]
        self.tuner, plan = self.tuner.finish(times)
        return self._freeze(plan)

    def _thaw(self, reason: str) -> list[m.Message]:
        self.epoch += 1
        self.frozen, self.stopping = False, True
        self.stopped.clear()
        self.finished.clear()
        self.table.clear()
        self.since_s.clear()
        return [m.Thaw(self.epoch, reason)]

    def _resume(self) -> list[m.Message]:
        if len(self.stopped.keys() | self.left) < self.size:
            return []
        launched = max(self.stopped.values(), default=0)
        self.freezing.end_plan(passes=inf if self.trials else launched / self.plan_buckets)
        self.stopping = False
        return [m.Resume(self.epoch, launched)]

    # ---- stalls

    def _stalls(self, now_s: float) -> tuple[m.Stalled, ...]:
        everyone = set(range(self.size))
        if self.stopping:
            late = tuple(sorted(everyone - self.stopped.keys()))
            return (m.Stalled("", tuple(sorted(self.stopped)), late, 0.0),)
        return tuple(
            m.Stalled(
                name,
                tuple(sorted(requests)),
                tuple(sorted(everyone - requests.keys() - self.joined)),
                now_s - self.since_s[name],
            )
            for name, requests in self.table.items()
        )


def _merged(requests: dict[int, Request]) -> Request:
    """Returns one request that stands for the requests of all ranks. It has the latest phase and
    the highest priority of these requests.
    """
    request = next(iter(requests.values()))
    uneven = len({each.shape for each in requests.values()}) > 1
    return replace(
        request,
        shape=(_ANY_LENGTH, *request.shape[1:]) if uneven else request.shape,
        phase=max(request.phase for request in requests.values()),
        priority=max(request.priority for request in requests.values()),
    )


def _is_uneven(request: Request) -> bool:
    """Returns True for an all_gather of arrays whose lengths differ between ranks. A plan cannot
    contain such a tensor.
    """
    return request.shape[:1] == (_ANY_LENGTH,)


def _with_groups(requests: Iterable[Request]) -> dict[str, None]:
    """Returns the names of the tensors and of all tensors in their groups, without duplicates."""
    return dict.fromkeys(name for each in requests for name in (each.name, *each.group))


def _refused_by_join(request: Request, joined: list[int]) -> str | None:
    if not joined:
        return None
    gone = f"tensor {request.name!r}: {ranks_text(joined)} joined and cannot take part"
    if request.operation in ("reduce_scatter", "all_to_all"):
        return f"{gone} in {request.operation}; all_reduce, all_gather and broadcast still work"
    if request.operation == "broadcast" and request.root in joined:
        return f"{gone} as the root of a broadcast"
    return None
