"""What a training run is told: plain data, made by the parent and read by every rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

TaskName = Literal["digits", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How a task is judged on data that it has not seen."""

    label: str
    unit: str
    scale: float
    target: float | None
    """What a run of the default length must reach, before `scale`; None where there is no bar."""

    def format(self, value: float) -> str:
        return f"{value * self.scale:.2f}{self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """What the parent knows of a task without importing it."""

    noun: str
    """What one sample is called."""
    period: str
    """What a stretch of training between two reports is called."""
    score: Score
    loss_tolerance: float
    """Largest difference of two loss curves that rounding explains; see `report.Agreement`."""


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
class Run:
    """One job: the same training on each backend, in turns.

    The first backend is that of the default process group.
    """

    task: TaskName
    backends: tuple[str, ...]
    ranks: int
    seed: int
    batch: int
    """Samples a rank takes for one step."""
    periods: int
    """Stretches of training; the losses are gathered and the score is taken after each."""
    steps_per_period: int | None = None
    """None: as many as the shard of a rank has, which makes a period an epoch."""
    learning_rate: float
    measured_groups: int = 12
    """Groups of exchanges, and of passes, timed after the training; see `communication`."""
    timeout_s: float = 120.0
    """How long a rank waits for another one in a collective."""

    def __post_init__(self) -> None:
        if not self.backends or len(set(self.backends)) < len(self.backends):
            raise ValueError(f"need one backend or several different ones, not {self.backends}")
        if self.task not in TASKS:
            raise ValueError(f"unknown task {self.task!r}; known: {', '.join(TASKS)}")
        for name in ("ranks", "batch", "periods", "measured_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Run:
        fields = json.loads(text)
        return Run(**(fields | {"backends": tuple(fields["backends"])}))
