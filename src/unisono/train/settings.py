"""Settings of a training run, which the parent process writes and every rank reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

TaskName = Literal["digits", "text"]

CONTROLLER = "controller"
"""Name of a run with `unisono.parallel.data_parallel` on a `unisono` group. Other names are those
of backends, which run with torch's DistributedDataParallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The measure of a model's quality on unseen data of a task."""

    label: str
    unit: str
    scale: float
    target: float | None
    """Least score that a run of default length must reach; None without a target. Compared with the
    score before multiplication by `scale`."""

    def format(self, value: float) -> str:
        return f"{value * self.scale:.2f}{self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Facts about a task for the parent process, which does not import the task."""

    noun: str
    """Name of the samples, for example "images"."""
    period: str
    """Name of a training period, for example "epoch"."""
    score: Score
    loss_tolerance: float
    """Largest difference between the losses of two runs that rounding can explain; see
    `Agreement`."""


TASKS: dict[TaskName, TaskFacts] = {
    "digits": TaskFacts(
        noun="images",
        period="epoch",
        score=Score(label="test accuracy", unit=" %", scale=100.0, target=0.97),
        loss_tolerance=1e-5,
    ),
    "text": TaskFacts(
        noun="windows",
        period="period",
        score=Score(label="held-out bits per byte", unit="", scale=1.0, target=None),
        loss_tolerance=1e-3,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The settings of one job: the same training on each backend. The backends take turns.

    The first backend is that of the default process group. `CONTROLLER` may be one of the backends.
    """

    task: TaskName
    backends: tuple[str, ...]
    ranks: int
    seed: int
    batch: int
    """Number of samples per rank and step."""
    periods: int
    """Number of training periods. After each period the ranks average the losses and compute the
    score.
    """
    steps_per_period: int | None = None
    """Number of steps in a period. None: all batches of a rank's shard, so a period is an epoch."""
    learning_rate: float
    measured_groups: int = 12
    """Number of groups of exchanges, and number of groups of passes, that are timed after the
    training; see `communication`."""
    timeout_s: float = 120.0
    """Seconds that a rank waits for another rank in a collective."""

    def __post_init__(self) -> None:
        if not self.backends or len(set(self.backends)) < len(self.backends):
            raise ValueError(f"backends: expected one or more distinct names, not {self.backends}")
        if self.task not in TASKS:
            raise ValueError(f"task: expected one of {', '.join(TASKS)}, not {self.task!r}")
        for name in ("ranks", "batch", "periods", "measured_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, not {getattr(self, name)}")

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> TrainingRun:
        fields = json.loads(text)
        return TrainingRun(**(fields | {"backends": tuple(fields["backends"])}))
