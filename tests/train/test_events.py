from __future__ import annotations

import pytest

from unisono.train import events
from unisono.train.settings import TASKS, TrainingRun


def a_run(**changes: object) -> TrainingRun:
    fields = {
        "task": "digits",
        "backends": ("unisono", "gloo"),
        "ranks": 2,
        "seed": 0,
        "batch": 16,
        "periods": 1,
        "learning_rate": 0.1,
    }
    return TrainingRun(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "event",
    [
        events.Started(total_steps=10, parameters=5),
        events.Stepped(backend="gloo", step=3, loss=0.25),
        events.Scored(backend="gloo", period=1, score=0.5),
        events.Measuring(),
        events.BackendFinished(
            backend="gloo",
            score=0.98,
            losses=[2.3, 0.1],
            step_s=[0.01, 0.02],
            exchange_s=[0.001],
            synced_s=[0.01],
            unsynced_s=[0.008],
            bucket_bytes=[1024],
            same_parameters=True,
            sample="def é\n",
        ),
    ],
)
def test_an_event_survives_encoding(event: events.Event) -> None:
    line = events.encode(event)
    assert "\n" not in line
    assert events.decode(line) == event


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"event": "Stepped", "step": 1}'])
def test_a_line_without_an_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        events.decode(line)


def test_a_run_survives_encoding() -> None:
    run = a_run(steps_per_period=3)
    assert TrainingRun.decode(run.encode()) == run


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "chess"},
        {"backends": ()},
        {"backends": ("gloo", "gloo")},
        {"ranks": 0},
        {"batch": 0},
        {"periods": -1},
    ],
)
def test_an_impossible_run_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        a_run(**changes)


def test_scores_are_shown_in_their_unit() -> None:
    assert TASKS["digits"].score.format(0.98765) == "98.77 %"
    assert TASKS["text"].score.format(3.141) == "3.14"
