"""The fusion tuner: measures steps, then computes and tests new buckets. A pure state machine.

Rank 0 asks the tuner each time it freezes a plan. The tuner answers with the plan to follow. If
that plan is a trial, all ranks report their measurements, and the tuner answers with the next plan.
Tuning has three parts:

1. A trial measures when tensors are ready, and the times of buckets of several sizes.
2. A line through the times gives the latency and the time per byte of a collective. Dynamic
   programming finds the buckets that finish first (`best_buckets`).
3. More trials compare both plans. They run pairs of blocks of steps, one block with each plan, in
   random order. Of `pairs` pairs, `faster_pairs` must be faster with the new buckets, by at least
   `least_gain` in the median. Otherwise the old buckets stay. The comparison ends early once the
   new buckets cannot win any more.

The rule in 3 is a sign test. If the new buckets are not better, they are faster in a pair with a
probability of at most 1/2. Other causes of slow steps do not change this, because they do not
depend on the random order. So the rule is wrong with a probability of at most
`TuningSettings.error_rate`: 1.1 % by default.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from unisono.controller.fusion.buckets import Bucket
from unisono.controller.fusion.cost_fit import CostFit, fit_cost
from unisono.controller.fusion.fusion_choice import (
    best_buckets,
    predicted_s,
    probe_buckets,
    units_of,
)
from unisono.controller.fusion.fusion_report import FusionReport
from unisono.controller.fusion.fusion_trial import PassTimes, Trial
from unisono.controller.fusion.trial_results import bucket_times, pair_times, slowest_s
from unisono.controller.fusion.tuning_settings import TuningSettings
from unisono.controller.request import Request

# Maximum number of units that are tuned. The time to choose their buckets grows with the square of
# the number of units.
_MOST_UNITS = 4096
# Maximum bytes of all tensors of a tuned plan. Each plan of a trial has buffers of that size.
_MOST_BYTES = 1 << 30
# Maximum number of sets of tensors that are tuned. Later sets keep their buckets.
_MOST_SETS = 8
# Maximum number of attempts to tune one set. An attempt fails if the ranks leave a trial.
_MOST_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPlan:
    """The plan that all ranks follow next. Without a `trial`, its length is not limited."""

    buckets: tuple[Bucket, ...]
    trial: Trial | None = None
    report: FusionReport | None = None
    """The result of the tuning; None until the tuner has decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionTuner:
    """Rank 0's state of the fusion tuner. Immutable: methods return a new state."""

    settings: TuningSettings = field(default_factory=TuningSettings)
    seed: int = 0
    """Seed of the random order of blocks in a comparison."""
    tensors: frozenset[Request] = frozenset()
    """The set of tensors that is tuned now."""
    before: tuple[Bucket, ...] = ()
    """The buckets that `fusion_bytes` gives for `tensors`."""
    after: tuple[Bucket, ...] = ()
    """The new buckets that the tuner chose. Empty before the choice."""
    trial: Trial | None = None
    """The trial that the ranks run now."""
    tries: int = 0
    steps_used: int = 0
    draft: FusionReport | None = None
    """The report without the results of the comparison."""
    compared_s: tuple[tuple[float, float], ...] = ()
    """Mean step time of each pair so far, with the old and with the new buckets."""
    decided: tuple[tuple[frozenset[Request], tuple[Bucket, ...]], ...] = ()
    """The sets of tensors that were tuned, and their buckets."""
    coins: int = 0
    """Number of comparison trials so far. Each trial has its own random order."""

    def freeze(self, buckets: tuple[Bucket, ...]) -> tuple[FusionTuner, NextPlan]:
        """Returns the new tuner and the plan to follow first. `buckets` are those that
        `fusion_bytes` gives.
        """
        tensors = frozenset(request for bucket in buckets for request in bucket.requests)
        known = dict(self.decided).get(tensors)
        if known is not None:
            return self, NextPlan(buckets=known)
        again = tensors == self.tensors
        tuner = replace(
            self,
            tensors=tensors,
            before=buckets,
            after=(),
            trial=None,
            draft=None,
            compared_s=(),
            tries=self.tries + 1 if again else 1,
            steps_used=self.steps_used if again else 0,
        )
        if len(self.decided) >= _MOST_SETS:
            return tuner, NextPlan(buckets=buckets)
        obstacle = tuner._obstacle()
        if obstacle is not None:
            return tuner._keep(obstacle)
        return tuner._measure()

    def finish(self, times: Sequence[PassTimes]) -> tuple[FusionTuner, NextPlan]:
        """Processes the ranks' measurements of a trial. Returns the new tuner and the next plan."""
        assert self.trial is not None  # only trials have an end that ranks report
        tuner = replace(self, steps_used=self.steps_used + len(self.trial.order))
        return tuner._compared(times) if self.after else tuner._chosen(times)

    # ---- the first trial

    def _obstacle(self) -> str | None:
        """Returns the reason not to tune these tensors, or None."""
        units = units_of(self.before)
        nbytes = sum(bucket.nbytes for bucket in self.before)
        if len(units) < 2:
            return "the plan has one bucket that cannot be split"
        if len(units) > _MOST_UNITS:
            return f"{len(units)} tensors are more than the {_MOST_UNITS} that are tuned"
        if nbytes > _MOST_BYTES:
            return f"{nbytes} bytes are more than the {_MOST_BYTES} that are tuned"
        if self.tries > _MOST_TRIES:
            return f"the ranks left the plan in {_MOST_TRIES} trials"
        return None

    def _measure(self) -> tuple[FusionTuner, NextPlan]:
        settings = self.settings
        turns = [i % 2 for i in range(settings.measured)]
        order = (*(0,) * settings.warm_up, *(1,) * settings.warm_up, *turns, 0)
        trial = Trial(probe_buckets(self.before), order, True)
        return replace(self, trial=trial), NextPlan(buckets=self.before, trial=trial)

    def _chosen(self, times: Sequence[PassTimes]) -> tuple[FusionTuner, NextPlan]:
        """Fits the cost, chooses new buckets, and begins the comparison."""
        assert self.trial is not None
        first = 2 * self.settings.warm_up
        names = [request.name for bucket in self.before for request in bucket.requests]
        ready_s = dict(zip(names, slowest_s([each.ready_ns for each in times]), strict=True))
        fit = fit_cost(*bucket_times(self.before, self.trial, times, first))
        if fit is None:
            return self._keep("the times of buckets do not tell latency and bandwidth apart")
        after = best_buckets(self.before, ready_s, fit.cost)
        tuner = replace(self, draft=self._draft(fit, ready_s, after))
        if fit.residual > self.settings.most_residual:
            return tuner._keep(f"the fit is poor: its median error is {fit.residual:.0%}")
        if _parts(after) == _parts(self.before):
            return tuner._keep("no other buckets are predicted to finish earlier")
        steps_s = slowest_s([each.step_ns for each in times])
        own = [s for s, which in zip(steps_s, self.trial.order, strict=False) if which == 0]
        saved_s = predicted_s(self.before, ready_s, fit.cost) - predicted_s(
            after, ready_s, fit.cost
        )
        if saved_s < self.settings.least_gain * median(own[self.settings.warm_up :]):
            return tuner._keep("the predicted gain is too small to matter")
        return tuner._compare(after)

    def _draft(
        self, fit: CostFit, ready_s: Mapping[str, float], after: tuple[Bucket, ...]
    ) -> FusionReport:
        return replace(
            self._report(""),
            alpha_s=fit.cost.latency_s,
            beta_s_per_byte=fit.cost.s_per_byte,
            r2=fit.r2,
            residual=fit.residual,
            predicted_before_s=predicted_s(self.before, ready_s, fit.cost),
            predicted_after_s=predicted_s(after, ready_s, fit.cost),
        )

    # ---- the comparison

    def _compare(self, after: tuple[Bucket, ...]) -> tuple[FusionTuner, NextPlan]:
        """Returns the new tuner and the next trial of the comparison. The first of these trials
        begins with warm-up steps.
        """
        settings = self.settings
        coins = random.Random(f"{self.seed} {self.coins}")
        count = min(settings.trial_pairs, settings.pairs - len(self.compared_s))
        blocks = [which for _ in range(count) for which in coins.choice([(0, 1), (1, 0)])]
        turns = tuple(which for which in blocks for _ in range(settings.block))
        warm_up = () if self.compared_s else (*(0,) * settings.warm_up, *(1,) * settings.warm_up)
        trial = Trial(after, (*warm_up, *turns, 0), False)
        tuner = replace(self, after=after, trial=trial, coins=self.coins + 1)
        return tuner, NextPlan(buckets=self.before, trial=trial)

    def _compared(self, times: Sequence[PassTimes]) -> tuple[FusionTuner, NextPlan]:
        """Adds the times of a trial to the comparison. Then begins the next trial, or makes the
        decision by the sign test.
        """
        assert self.trial is not None
        settings = self.settings
        warm_up = 0 if self.compared_s else 2 * settings.warm_up
        steps_s = slowest_s([each.step_ns for each in times])
        found = pair_times(self.trial.order[warm_up:], steps_s[warm_up:], settings.block)
        tuner = replace(self, compared_s=(*self.compared_s, *found))
        pairs = len(tuner.compared_s)
        faster = sum(after < before for before, after in tuner.compared_s)
        if pairs < settings.pairs and faster + settings.pairs - pairs >= settings.faster_pairs:
            return tuner._compare(self.after)
        return tuner._test(faster)

    def _test(self, faster: int) -> tuple[FusionTuner, NextPlan]:
        settings = self.settings
        pairs = self.compared_s
        gain = median((before - after) / before if before > 0 else 0.0 for before, after in pairs)
        draft = replace(
            self.draft or self._report(""),
            measured_before_s=median(before for before, _ in pairs),
            measured_after_s=median(after for _, after in pairs),
            gain=gain,
            faster_pairs=faster,
            pairs=len(pairs),
        )
        tuner = replace(self, draft=draft)
        found = f"{faster} of {len(pairs)} pairs faster, {gain:.1%} in the median"
        if faster >= settings.faster_pairs and gain >= settings.least_gain:
            return tuner._decide(self.after, f"the comparison showed a gain: {found}")
        return tuner._keep(f"the comparison showed no certain gain: {found}")

    # ---- the decision

    def _keep(self, reason: str) -> tuple[FusionTuner, NextPlan]:
        return self._decide(self.before, reason)

    def _decide(self, buckets: tuple[Bucket, ...], reason: str) -> tuple[FusionTuner, NextPlan]:
        draft = self.draft or self._report("")
        report = replace(
            draft,
            replaced=buckets is not self.before,
            reason=reason,
            buckets=tuple(bucket.names for bucket in buckets),
            bucket_bytes=tuple(bucket.nbytes for bucket in buckets),
            steps_used=self.steps_used,
        )
        decided = (*self.decided, (self.tensors, buckets))
        tuner = replace(self, trial=None, after=(), draft=None, compared_s=(), decided=decided)
        return tuner, NextPlan(buckets=buckets, report=report)

    def _report(self, reason: str) -> FusionReport:
        sizes = tuple(bucket.nbytes for bucket in self.before)
        return FusionReport(
            replaced=False,
            reason=reason,
            buckets=(),
            bucket_bytes=sizes,
            before_bucket_bytes=sizes,
        )


def _parts(buckets: Sequence[Bucket]) -> list[frozenset[str]]:
    return [frozenset(bucket.names) for bucket in buckets]
