"""One line for each backend while it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from unisono.train import events
from unisono.train.settings import TASKS, Run


@contextlib.contextmanager
def shown(
    runs: Sequence[Run], console: Console
) -> Iterator[Callable[[Run], Callable[[events.Event], None]]]:
    """Gives a function that makes the listener of a run."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        lines = {
            run.backend: progress.add_task(run.backend, start=False, total=None, state="waiting")
            for run in runs
        }

        def listener(run: Run) -> Callable[[events.Event], None]:
            line = lines[run.backend]
            progress.start_task(line)
            progress.update(line, state=f"starting {run.ranks} ranks")
            return _Line(progress, line, run)

        yield listener


class _Line:
    """Turns the events of one run into the state of its line."""

    def __init__(self, progress: Progress, line: TaskID, run: Run) -> None:
        self._progress = progress
        self._line = line
        self._facts = TASKS[run.task]
        self._score = ""
        self._total_steps = 0

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.Started(total_steps=total_steps):
                self._total_steps = total_steps
                self._progress.update(self._line, total=total_steps, state="training")
            case events.Stepped(step=step, loss=loss):
                state = f"loss {loss:.4f}{self._score}"
                self._progress.update(self._line, completed=step, state=state)
            case events.Scored(period=period, score=score):
                facts = self._facts
                shown_score = f"{facts.score.label} {facts.score.format(score)}"
                self._score = f", {shown_score} after {facts.period} {period}"
            case events.Measuring():
                self._progress.update(
                    self._line, completed=self._total_steps, state="measuring communication"
                )
            case events.Finished(losses=losses, score=score):
                label, result = self._facts.score.label, self._facts.score.format(score)
                state = f"loss {losses[-1]:.4f}, {label} {result}"
                self._progress.update(self._line, completed=self._total_steps, state=state)
                self._progress.stop_task(self._line)
