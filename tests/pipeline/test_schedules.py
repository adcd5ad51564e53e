"""Pipeline schedules: closed forms of bubbles and memory, compared with simulated schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedule_runs import run_schedule
from unisono import pipeline

sizes = {"stages": st.integers(1, 6), "rounds": st.integers(1, 4)}
times = st.floats(0.1, 10)


@given(**sizes, forward_s=times, backward_s=times, schedule=st.sampled_from(["1f1b", "gpipe"]))
def test_bubble_of_equal_stages(
    stages: int, rounds: int, forward_s: float, backward_s: float, schedule: str
) -> None:
    """Compares the bubble with the closed form (p - 1)(F + B) of `pipeline_bubbles.csv`."""
    microbatches = stages * rounds
    run = run_schedule(
        schedule,
        forward_s=[forward_s] * stages,
        backward_s=[backward_s] * stages,
        microbatches=microbatches,
    )
    bubble = (stages - 1) * (forward_s + backward_s)
    assert run.makespan_s == pytest.approx(microbatches * (forward_s + backward_s) + bubble)
    size = pipeline.PipelineSize(stages, 1, microbatches)
    for stage, kept in enumerate(run.kept):
        assert kept == pipeline.SCHEDULES[schedule].kept(size, stage)
    assert pipeline.SCHEDULES[schedule].bubble(size, 0) == 1


@given(**sizes, chunks=st.integers(2, 4), forward_s=times, ratio=st.floats(1, 3))
def test_bubble_of_interleaved_stages(
    stages: int, rounds: int, chunks: int, forward_s: float, ratio: float
) -> None:
    """Compares the bubble with (p - 1)(F + B) / v, and the memory with p v + p - 1 chunks on the
    first stage.
    """
    microbatches, backward_s = stages * rounds, forward_s * ratio
    run = run_schedule(
        "interleaved",
        forward_s=[forward_s] * stages,
        backward_s=[backward_s] * stages,
        microbatches=microbatches,
        chunks=chunks,
    )
    bubble = (stages - 1) * (forward_s + backward_s) / chunks
    assert run.makespan_s == pytest.approx(microbatches * (forward_s + backward_s) + bubble)
    size, rules = (
        pipeline.PipelineSize(stages, chunks, microbatches),
        pipeline.SCHEDULES["interleaved"],
    )
    for stage, kept in enumerate(run.kept):
        assert kept == rules.kept(size, stage)
    assert rules.bubble(size, 0) == 1 / chunks


@given(stages=st.integers(2, 6), rounds=st.integers(2, 4))
def test_bubble_of_zero_bubble_stages(stages: int, rounds: int) -> None:
    """Tests that ZB-H1 has a third of 1F1B's bubble and the same memory, if F = I = W."""
    microbatches = stages * rounds
    run = run_schedule(
        "zb1p",
        forward_s=[1.0] * stages,
        backward_s=[2.0] * stages,
        microbatches=microbatches,
    )
    assert run.makespan_s == pytest.approx(3 * microbatches + (stages - 1))
    size, rules = pipeline.PipelineSize(stages, 1, microbatches), pipeline.SCHEDULES["zb1p"]
    assert max(run.kept) <= rules.kept(size, 0)
    assert rules.bubble(size, 0) == pytest.approx(1 / 3)


@settings(max_examples=60)
@given(
    stages=st.integers(2, 6),
    ends=st.tuples(st.floats(0.7, 1), st.floats(0.7, 1.5)),
    ratio=st.floats(1, 3),
    rounds=st.integers(2, 5),
)
def test_unequal_ends(stages: int, ends: tuple[float, float], ratio: float, rounds: int) -> None:
    """Compares a step with its closed form: m times the slowest stage plus all other stages once.
    The form is exact if the last stage is the slowest. Otherwise it differs by at most the
    difference of two stages.
    """
    forward_s = [ends[0], *[1.0] * (stages - 2), ends[1]]
    backward_s = [ratio * each for each in forward_s]
    microbatches = rounds * stages
    run = run_schedule(
        "1f1b", forward_s=forward_s, backward_s=backward_s, microbatches=microbatches
    )
    totals = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    form = microbatches * max(totals) + sum(totals) - max(totals)
    if totals[-1] == max(totals):
        assert run.makespan_s == pytest.approx(form)
    else:
        assert abs(run.makespan_s - form) <= max(totals) - min(totals) + 1e-9


def test_messages_lengthen_the_run() -> None:
    stages = {"forward_s": [1.0] * 4, "backward_s": [2.0] * 4, "microbatches": 8}
    still = run_schedule("1f1b", **stages).makespan_s  # type: ignore[arg-type]
    sent = run_schedule("1f1b", **stages, send_s=0.1).makespan_s  # type: ignore[arg-type]
    assert sent >= still + 6 * 0.1


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no order of tasks is known for the schedule 'zbv'"):
        pipeline.stage_tasks("zbv", stages=2, microbatches=4)
    with pytest.raises(ValueError, match="needs a multiple of 4 microbatches, not 6"):
        pipeline.stage_tasks("interleaved", stages=4, microbatches=6, chunks=2)
