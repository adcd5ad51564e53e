"""The rules by which negotiating ranks begin to follow a frozen plan, and by which they leave it.

A plan begins when consecutive steps (iterations of the program) have the same tensors. The ranks
leave it when tensors outside the plan recur. A plan that the ranks soon leave delays the next plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from unisono.controller.request import Request

FREEZE_AFTER = 2
"""Number of consecutive steps with the same tensors before the first plan is frozen."""

_MOST_STEPS = 1024
# If the ranks leave a plan after fewer passes than this, `freeze_after` doubles.
_LASTING_PASSES = 16
# The ranks leave the first plan when a tensor has run this many times outside the plan.
_SIDE_RUNS = 3


@dataclass(slots=True, kw_only=True)
class PlanFreezing:
    """The tensors of the current step and of the last step, and the decisions that follow."""

    freeze_after: int = FREEZE_AFTER
    """Number of consecutive steps with the same tensors before the next plan is frozen."""
    step: dict[str, Request] = field(default_factory=dict)
    """The tensors that have run since the current step began."""
    last_step: dict[str, Request] = field(default_factory=dict)
    phases: dict[str, dict[int, int]] = field(default_factory=dict)
    """For each tensor of the current step, the phase that each rank gave it (`Request.phase`)."""
    alike: int = 0
    """Number of consecutive steps with the same tensors."""
    side_runs: Counter[str] = field(default_factory=Counter)
    """Number of times that each tensor has run outside the plan since the plan began."""
    side_limit: int = _SIDE_RUNS

    def copy(self) -> PlanFreezing:
        """Returns a copy that shares no mutable state."""
        return replace(
            self,
            step=dict(self.step),
            last_step=dict(self.last_step),
            phases=dict(self.phases),
            side_runs=Counter(self.side_runs),
        )

    def add(self, agreed: Mapping[str, Request], phases: Mapping[str, dict[int, int]]) -> None:
        """Adds tensors that run now to the step. `phases`: the phase of each tensor by rank."""
        self.step |= agreed
        self.phases |= phases

    def has_ended(self, ready: Iterable[str], waiting: Iterable[str]) -> bool:
        """Returns True if the current step has ended: a tensor that ran in it is ready again, and
        all tensors that still wait have run in it too.
        """
        if not any(name in self.step for name in ready):
            return False
        return all(name in self.step for name in waiting)

    def end_step(self) -> list[Request]:
        """Ends the current step. Returns the tensors of a plan if one should begin; else nothing.

        Each tensor of the plan has one phase that is valid for all ranks.
        """
        same = _signatures(self.step) == _signatures(self.last_step)
        self.alike = self.alike + 1 if same else 1
        phases = self.phases
        self.last_step, self.step, self.phases = self.step, {}, {}
        if self.alike < self.freeze_after:
            return []
        return list(_in_phases(self.last_step, phases))

    def begin_plan(self) -> None:
        """Notes that a plan begins."""
        self.side_runs.clear()

    def add_side_runs(self, names: Iterable[str]) -> bool:
        """Counts tensors that ran outside the plan. Returns True if the ranks should leave it."""
        found = list(names)
        self.side_runs.update(found)
        if all(self.side_runs[name] < self.side_limit for name in found):
            return False
        self.side_limit *= 2
        return True

    def end_plan(self, *, passes: float) -> None:
        """Notes that the ranks have left a plan after a number of passes through it."""
        lasted = passes >= _LASTING_PASSES
        self.freeze_after = FREEZE_AFTER if lasted else min(2 * self.freeze_after, _MOST_STEPS)
        self.forget()

    def interrupt(self) -> None:
        """Forgets how often the same step has repeated, for example because a rank joins."""
        self.alike = 0

    def forget(self) -> None:
        """Forgets all steps."""
        self.alike = 0
        self.step, self.last_step, self.phases = {}, {}, {}


def _in_phases(
    step: Mapping[str, Request], phases: Mapping[str, Mapping[int, int]]
) -> Iterator[Request]:
    """Yields the tensors of a step, each with one phase that is valid for all ranks.

    Two tensors are in one phase if no rank waited between them. Each rank counts its waits from its
    first tensor of the step. Tensors are ordered by the sum of these counts, which is larger for a
    tensor that is later on some ranks and not earlier on any rank.
    """
    first: dict[int, int] = {}
    for by_rank in phases.values():
        for rank, phase in by_rank.items():
            first[rank] = min(phase, first.get(rank, phase))
    waits = {
        name: tuple(phase - first[rank] for rank, phase in sorted(by_rank.items()))
        for name, by_rank in phases.items()
    }
    ordered = sorted(set(waits.values()), key=lambda found: (sum(found), found))
    index = {found: position for position, found in enumerate(ordered)}
    for name, request in step.items():
        yield replace(request, phase=index[waits[name]])


def _signatures(step: Mapping[str, Request]) -> dict[str, Request]:
    return {name: replace(request, phase=0) for name, request in step.items()}
