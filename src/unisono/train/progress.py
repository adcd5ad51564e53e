"""Display of a training's progress, with one line per backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from unisono.train import events
from unisono.train.settings import TASKS, TrainingRun


@contextlib.contextmanager
def shown(run: TrainingRun, console: Console) -> Iterator[Callable[[events.Event], None]]:
    """Yields a function that takes events and displays their progress."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        lines = {
            backend: _Line(progress, progress.add_task(backend, total=None, state=""), run)
            for backend in run.backends
        }
        for line in lines.values():
            line.set_state(f"starting {run.ranks} ranks")

        def listen(event: events.Event) -> None:
            for backend, line in lines.items():
                if getattr(event, "backend", backend) == backend:
                    line.show(event)

        yield listen


class _Line:
    """The line of one backend, which events update."""

    def __init__(self, progress: Progress, line: TaskID, run: TrainingRun) -> None:
        self._progress = progress
        self._line = line
        self._facts = TASKS[run.task]
        self._score = ""
        self._total_steps = 0

    def set_state(self, state: str) -> None:
        self._progress.update(self._line, state=state)

    def show(self, event: events.Event) -> None:
        score = self._facts.score
        match event:
            case events.Started():
                self._total_steps = event.total_steps
                self._progress.update(self._line, total=event.total_steps, state="training")
            case events.Stepped():
                self._progress.update(self._line, completed=event.step)
                self.set_state(f"loss {event.loss:.4f}{self._score}")
            case events.Scored():
                self._score = f", {score.label} {score.format(event.score)}"
            case events.Measuring():
                self._progress.update(self._line, completed=self._total_steps)
                self.set_state("measuring communication")
            case events.BackendFinished():
                self.set_state(
                    f"loss {event.losses[-1]:.4f}, {score.label} {score.format(event.score)}"
                )
                self._progress.stop_task(self._line)
