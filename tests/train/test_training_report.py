from __future__ import annotations

import json
import math

import pytest
from rich.console import Console

from unisono.train.events import BackendFinished
from unisono.train.settings import TrainingRun
from unisono.train.training_report import Outcome, Report


def outcome(
    backend: str,
    *,
    losses: list[float] | None = None,
    scale: float = 1.0,
    score: float = 0.98,
    same_parameters: bool = True,
) -> Outcome:
    """Returns the outcome of a run whose times are proportional to `scale`."""
    return Outcome(
        run=TrainingRun(
            task="digits",
            backends=("unisono", "gloo"),
            ranks=4,
            seed=0,
            batch=16,
            periods=1,
            learning_rate=0.1,
        ),
        finished=BackendFinished(
            backend=backend,
            score=score,
            losses=losses or [2.0, 1.0, 0.5],
            step_s=[0.010 * scale, 0.020 * scale, 0.030 * scale],
            exchange_s=[0.001 * scale, 0.002 * scale, 0.009 * scale],
            synced_s=[0.010 + 0.003 * scale, 0.020 + 0.003 * scale],
            unsynced_s=[0.010, 0.020],
            bucket_bytes=[1024, 2048],
            same_parameters=same_parameters,
            sample="",
        ),
    )


def report(*outcomes: Outcome, is_default_length: bool = True) -> Report:
    return Report(outcomes=outcomes, is_default_length=is_default_length)


def shown(report_: Report) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report_.table())
    return capture.get()


def test_figures_of_a_run_are_medians() -> None:
    one = outcome("unisono")
    assert one.step_s == 0.020
    assert one.exchange_s == 0.002
    assert one.samples_per_s == pytest.approx(3 * 64 / 0.060)
    # Passes are compared in pairs, so that a machine that slows down during the run does not change
    # the result.
    assert one.added_s == pytest.approx(0.003)


def test_the_table_shows_times_and_ratios() -> None:
    both = report(outcome("unisono"), outcome("gloo", scale=5.0))
    text = shown(both)
    assert "4 ranks, 3 steps of 4 x 16 images, gradients of 1 + 2 KiB a step" in both.title
    assert "98.00 %" in text
    assert "speed-up 5.00 x" in text
    assert "2.00 ms" in text and "10.00 ms" in text


def test_a_single_backend_has_no_ratio() -> None:
    single = report(outcome("gloo"))
    assert "speed-up" not in shown(single)
    assert single.agreements == ()
    assert single.failures == ()


def test_rounding_errors_are_accepted() -> None:
    one = outcome("unisono")
    other = outcome("gloo", losses=[2.0, 1.0 + 1e-7, 0.5])
    both = report(one, other)
    (agreement,) = both.agreements
    assert agreement.holds
    assert agreement.step == 2
    assert agreement.difference == pytest.approx(1e-7, rel=1e-3)
    assert both.failures == ()


@pytest.mark.parametrize("wrong", [0.51, math.nan, math.inf])
def test_different_losses_fail(wrong: float) -> None:
    both = report(outcome("unisono"), outcome("gloo", losses=[2.0, 1.0, wrong]))
    (failure,) = both.failures
    assert "DISAGREE" in failure and "at step 3" in failure


def test_different_parameters_fail() -> None:
    (failure,) = report(outcome("gloo", same_parameters=False)).failures
    assert failure == "on gloo the ranks ended with different parameters"


def test_only_a_run_of_default_length_must_reach_the_target() -> None:
    (failure,) = report(outcome("gloo", score=0.95)).failures
    assert failure == "test accuracy on gloo is 95.00 %, below 97.00 %"
    assert report(outcome("gloo", score=0.95), is_default_length=False).failures == ()


def test_json_holds_figures_and_measurements() -> None:
    data = report(outcome("unisono"), outcome("gloo", scale=2.0)).as_json()
    data = json.loads(json.dumps(data))
    assert data["ok"] is True
    assert [run["backend"] for run in data["runs"]] == ["unisono", "gloo"]
    assert data["runs"][1]["step_median_s"] == 0.040
    assert data["runs"][0]["measured"]["losses"] == [2.0, 1.0, 0.5]
    assert data["agreements"][0]["holds"] is True
