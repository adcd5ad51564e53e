"""Report on runs with several backends: a table of their figures, and a comparison of losses."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from unisono.train.events import BackendFinished
from unisono.train.settings import TASKS, TaskFacts, TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a run on one backend, as figures."""

    run: TrainingRun
    finished: BackendFinished

    @property
    def final_loss(self) -> float:
        return self.finished.losses[-1]

    @property
    def step_s(self) -> float:
        """Median wall time of a training step, in seconds."""
        return median(self.finished.step_s)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together, over all training steps."""
        samples = self.run.batch * self.run.ranks * len(self.finished.step_s)
        return samples / sum(self.finished.step_s)

    @property
    def exchange_s(self) -> float:
        """Median time of one exchange of all gradients without computation, in seconds."""
        return median(self.finished.exchange_s)

    @property
    def added_s(self) -> float:
        """Median time in seconds that the exchange adds to a forward and backward pass.

        Noise can make a small time negative.
        """
        pairs = zip(self.finished.synced_s, self.finished.unsynced_s, strict=True)
        return median(synced - unsynced for synced, unsynced in pairs)

    @property
    def compute_s(self) -> float:
        """Median time of a forward and backward pass without the exchange, in seconds."""
        return median(self.finished.unsynced_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Comparison of two runs with one seed. Their losses should be equal up to rounding.

    Backends may add in different orders, so the loss curves may differ by rounding errors only. The
    tolerance of a task is 10 to 25 times the measured difference between a Gloo run with sums in
    float32 and a Gloo run with sums in float64 (digits 4e-7, text 9e-5). A wrong sum exceeds the
    tolerance within a few steps.
    """

    backends: tuple[str, str]
    difference: float
    """Largest difference between the losses of the two runs in a step."""
    step: int
    """Number of the step with the largest difference, from 1."""
    steps: int
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance  # also False for NaN

    def __str__(self) -> str:
        return (
            f"the loss curves of {self.backends[0]} and {self.backends[1]} "
            f"{'agree' if self.holds else 'DISAGREE'}: largest difference {self.difference:.1e} "
            f"over {self.steps} steps, at step {self.step} (tolerance {self.tolerance:.0e})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report on all outcomes of one command. It compares the first with each of the others."""

    outcomes: tuple[Outcome, ...]
    is_default_length: bool
    """True if the score must reach the task's target."""

    @property
    def facts(self) -> TaskFacts:
        return TASKS[self.outcomes[0].run.task]

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        first, *others = self.outcomes
        return tuple(_agreement(first, other, self.facts.loss_tolerance) for other in others)

    @property
    def failures(self) -> tuple[str, ...]:
        """Failed checks as text; empty if all checks pass."""
        wrong = [str(agreement) for agreement in self.agreements if not agreement.holds]
        for outcome in self.outcomes:
            name, score = outcome.finished.backend, outcome.finished.score
            if not outcome.finished.same_parameters:
                wrong.append(f"on {name} the ranks ended with different parameters")
            target = self.facts.score.target
            if self.is_default_length and target is not None and not score >= target:
                shown = self.facts.score.format(score)
                bar = self.facts.score.format(target)
                wrong.append(f"{self.facts.score.label} on {name} is {shown}, below {bar}")
        return tuple(wrong)

    def table(self) -> Table:
        """Returns a table with one column per backend.

        With several backends, a further column compares times: that of the last backend divided by
        that of the first.
        """
        names = [outcome.finished.backend for outcome in self.outcomes]
        table = Table()
        table.add_column()
        for name in names:
            table.add_column(name, justify="right")
        compares = len(names) > 1
        if compares:
            table.add_column(f"{names[-1]} / {names[0]}", justify="right", style="bold")
        for row in self._rows():
            shown = [row.format(value) for value in row.values]
            table.add_row(row.label, *shown, *([row.ratio()] if compares else []))
        return table

    @property
    def title(self) -> str:
        run, finished = self.outcomes[0].run, self.outcomes[0].finished
        sizes = " + ".join(f"{size / 1024:.0f}" for size in finished.bucket_bytes)
        return (
            f"{run.task}: {run.ranks} ranks, {len(finished.losses)} steps of "
            f"{run.ranks} x {run.batch} {self.facts.noun}, gradients of {sizes} KiB a step"
        )

    @property
    def legend(self) -> str:
        """Explanation of the table's rows on communication."""
        return (
            "Medians; the backends alternate. Alone: the all_reduce of DDP's gradient buckets "
            "without computation. Added: a forward and backward pass with it, minus one without."
        )

    def _rows(self) -> list[_Row]:
        each = self.outcomes
        score = self.facts.score
        return [
            _Row(score.label, [one.finished.score for one in each], score.unit, score.scale),
            _Row("final loss", [one.final_loss for one in each], digits=4),
            _Row(
                "training step, median",
                [one.step_s for one in each],
                " ms",
                1e3,
                faster="speed-up {:.2f} x",
            ),
            _Row(f"{self.facts.noun} a second", [one.samples_per_s for one in each], digits=0),
            _Row("forward + backward, no exchange", [one.compute_s for one in each], " ms", 1e3),
            _Row(
                "communication: gradients alone",
                [one.exchange_s for one in each],
                " ms",
                1e3,
                faster="{:.1f} x",
            ),
            _Row(
                "communication: added to a step",
                [one.added_s for one in each],
                " ms",
                1e3,
                faster="{:.1f} x",
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        """Returns the derived figures and all measurements as plain data for JSON."""
        return {
            "settings": asdict(self.outcomes[0].run),
            "ok": not self.failures,
            "failures": list(self.failures),
            "agreements": [
                {**asdict(agreement), "holds": agreement.holds} for agreement in self.agreements
            ],
            "runs": [
                {
                    "backend": outcome.finished.backend,
                    "score": outcome.finished.score,
                    "final_loss": outcome.final_loss,
                    "step_median_s": outcome.step_s,
                    "samples_per_s": outcome.samples_per_s,
                    "compute_median_s": outcome.compute_s,
                    "exchange_median_s": outcome.exchange_s,
                    "added_median_s": outcome.added_s,
                    "measured": asdict(outcome.finished),
                }
                for outcome in self.outcomes
            ],
        }


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    values: list[float]
    unit: str = ""
    scale: float = 1.0
    digits: int = 2
    faster: str = ""
    """Format of the ratio of the last value to the first; empty for rows without a ratio."""

    def format(self, value: float) -> str:
        return f"{value * self.scale:.{self.digits}f}{self.unit}"

    def ratio(self) -> str:
        first, last = self.values[0], self.values[-1]
        return self.faster.format(last / first) if self.faster and min(first, last) > 0 else ""


def _agreement(one: Outcome, other: Outcome, tolerance: float) -> Agreement:
    pairs = zip(one.finished.losses, other.finished.losses, strict=True)
    differences = [abs(left - right) for left, right in pairs]
    # Looks for NaN first: comparisons with NaN are false, so `max` could miss it.
    nans = [index for index, value in enumerate(differences) if math.isnan(value)]
    worst = nans[0] if nans else max(range(len(differences)), key=differences.__getitem__)
    return Agreement(
        backends=(one.finished.backend, other.finished.backend),
        difference=differences[worst],
        step=worst + 1,
        steps=len(differences),
        tolerance=tolerance,
    )
