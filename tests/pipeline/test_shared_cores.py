"""Pipelines whose ranks share cores: many cores, one core, and exact small cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.pipeline import StageTask, run_tasks, stage_tasks

times = st.floats(0.1, 10)


@given(
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    forward_s=times,
    backward_s=times,
    send_s=st.floats(0, 1),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb1p"]),
)
def test_a_core_for_each_rank_is_the_schedule_itself(
    stages: int,
    microbatches: int,
    forward_s: float,
    backward_s: float,
    send_s: float,
    schedule: str,
) -> None:
    orders = stage_tasks(schedule, stages=stages, microbatches=microbatches)
    durations = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}

    def seconds(task: StageTask) -> float:
        return durations[task.kind]

    alone_s = run_tasks(orders, seconds, send_s=send_s).makespan_s
    found_s = run_tasks(orders, seconds, cores=stages, send_s=send_s).makespan_s
    assert found_s == pytest.approx(alone_s)


@given(stages=st.integers(1, 4), microbatches=st.integers(1, 6), forward_s=times, backward_s=times)
def test_one_core_computes_all_the_work_without_a_pause(
    stages: int, microbatches: int, forward_s: float, backward_s: float
) -> None:
    orders = stage_tasks("1f1b", stages=stages, microbatches=microbatches)
    run = run_tasks(orders, lambda task: forward_s if task.kind == "F" else backward_s, cores=1)
    assert run.makespan_s == pytest.approx(stages * microbatches * (forward_s + backward_s))


def test_two_ranks_share_a_core_and_a_half() -> None:
    # Two ranks compute at 3/4 of a core until rank 0 ends at 4/3 s; then rank 1 has 2 s left.
    orders = [[(StageTask("F", 0, 0),)], [(StageTask("F", 1, 0),)]]
    run = run_tasks(orders, lambda task: 1.0 + 2 * task.microbatch, cores=1.5)
    assert run.makespan_s == pytest.approx(4 / 3 + 2)


def test_tasks_that_wait_for_each_other_are_refused() -> None:
    orders = [[(StageTask("B", 0, 0),), (StageTask("F", 0, 0),)], [(StageTask("F", 0, 1),)]]
    with pytest.raises(ValueError, match="wait for each other"):
        run_tasks(orders, lambda task: 1.0, cores=2)
