"""Compares the summary of steps with values computed by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeline.scripted_timeline import Event, collective, in_order, phase, scripted_dump, wait
from unisono.timeline import CONTROLLER_THREAD, EventKind, RankDump, summarize_steps
from unisono.timeline.interval_sets import difference, intersection, union
from unisono.timeline.rank_spans import Interval

SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda p: Interval(p[0], sum(p))),
    max_size=12,
)


def covered(spans: list[Interval]) -> set[int]:
    return {t for span in spans for t in range(span.begun_ns, span.ended_ns)}


@given(SPANS, SPANS)
def test_sets_of_times_are_sets(a: list[Interval], b: list[Interval]) -> None:
    a, b = union(a), union(b)
    assert covered(intersection(a, b)) == covered(a) & covered(b)
    assert covered(difference(a, b)) == covered(a) - covered(b)
    for found in (a, b, intersection(a, b), difference(a, b)):
        assert all(x.ended_ns <= y.begun_ns for x, y in itertools.pairwise(found))
        assert all(x.begun_ns < x.ended_ns for x in found)


def step(number: int, begun: float, backward: float = 20) -> list[Event]:
    """Returns a step of 10 ms forward, backward, 5 ms of waits and 3 ms of optimizer. The next step
    begins 2 ms later. Of two collectives, the first takes 8 ms within the backward pass. The second
    takes 9 ms and begins 4 ms before the end of the backward pass.
    """
    end = begun + 10 + backward
    return in_order(
        phase("forward", number, begun, begun + 10),
        phase("backward", number, begun + 10, end),
        collective(2 * number, "a", begun + 11, (begun + 11, begun + 19)),
        collective(2 * number + 1, "b", end - 5, (end - 4, end + 5)),
        [wait("b", end, end + 5)],
        phase("optimizer", number, end + 5, end + 8),
    )


def test_a_step_by_hand(tmp_path: Path) -> None:
    dump = scripted_dump(tmp_path, step(1, 0) + step(2, 40))
    [job] = summarize_steps([dump])
    first, second = (each.ranks[0] for each in job.steps)
    assert first.step_s == pytest.approx(40e-3)
    assert first.compute_s == pytest.approx(33e-3)
    assert first.communication_s == pytest.approx(17e-3)
    assert first.hidden_s == pytest.approx(12e-3)
    assert first.exposed_s == pytest.approx(5e-3)
    assert first.waited_s == pytest.approx(5e-3)
    assert first.overlap == pytest.approx(12 / 17)
    assert first.scale_factor == pytest.approx(35 / 40)
    assert sum(first.phases_s.values()) == pytest.approx(first.own_s) == pytest.approx(35e-3)
    assert second.step_s == pytest.approx(38e-3)  # the last step ends at the end of its optimizer
    assert job.missing_ranks == () and job.steps[0].slowest is None


def test_waits_inside_a_phase_are_no_computation(tmp_path: Path) -> None:
    events = in_order(
        phase("forward", 1, 0, 10),
        [wait("buffers", 2, 5)],
        collective(1, "buffers", 1, (1, 5)),
        phase("backward", 1, 10, 20),
    )
    [job] = summarize_steps([scripted_dump(tmp_path, events)])
    found = job.steps[0].ranks[0]
    assert found.compute_s == pytest.approx(17e-3)
    assert found.hidden_s == pytest.approx(1e-3) and found.exposed_s == pytest.approx(3e-3)


def test_waits_of_the_controllers_own_thread_do_not_count(tmp_path: Path) -> None:
    import threading

    recorded: list[RankDump] = []

    def record() -> None:
        events = in_order(phase("forward", 1, 0, 10), [wait("x", 2, 5)])
        recorded.append(scripted_dump(tmp_path, events))

    thread = threading.Thread(target=record, name=CONTROLLER_THREAD)
    thread.start()
    thread.join()
    [job] = summarize_steps(recorded)
    assert job.steps[0].ranks[0].waited_s == 0


def test_collectives_on_a_border_and_void_ones(tmp_path: Path) -> None:
    events = in_order(
        phase("forward", 1, 0, 10),
        collective(1, "a", 8, (8, 14)),
        [(3, EventKind.LAUNCHED, "v", 9), (6, EventKind.TRANSFERRED, "v", 9, 0, 3, 6)],
        phase("forward", 2, 12, 20),
    )
    [job] = summarize_steps([scripted_dump(tmp_path, events)])
    first, second = (each.ranks[0] for each in job.steps)
    assert first.communication_s == pytest.approx(4e-3)
    assert first.hidden_s == pytest.approx(2e-3)
    assert second.communication_s == second.hidden_s == pytest.approx(2e-3)


def test_the_slowest_rank_and_why(tmp_path: Path) -> None:
    dumps = [
        scripted_dump(tmp_path, step(1, 0, backward=20 + 4 * (r == 2)), rank=r, size=4)
        for r in range(4)
    ]
    [job] = summarize_steps(dumps)
    slowest = job.steps[0].slowest
    assert slowest is not None
    assert (slowest.rank, slowest.part) == (2, "backward")
    assert slowest.text == "rank 2: 24.00 ms backward, median 20.00 ms"
    assert job.slowest_line() == (
        "Slowest: rank 2 in 1 of 1 steps, by 4.00 ms backward above the median of the ranks."
    )


def test_a_rank_that_waits_longer_is_not_the_slowest(tmp_path: Path) -> None:
    """Tests that rank 1 is the slowest. Its backward pass takes 15 ms longer than rank 0's, and
    rank 0 waits 20 ms for it.
    """
    waits = in_order(phase("forward", 1, 0, 10), phase("backward", 1, 10, 20), [wait("b", 20, 40)])
    works = in_order(phase("forward", 1, 0, 10), phase("backward", 1, 10, 35))
    dumps = [
        scripted_dump(tmp_path, script, rank=r, size=2) for r, script in enumerate((waits, works))
    ]
    [job] = summarize_steps(dumps)
    slowest = job.steps[0].slowest
    assert slowest is not None and (slowest.rank, slowest.part) == (1, "backward")


def test_a_rank_that_loads_data_late_is_slow_outside_of_the_phases(tmp_path: Path) -> None:
    dumps = [
        scripted_dump(tmp_path, step(1, 0) + step(2, 40 + 30 * (r == 1)), rank=r, size=3)
        for r in range(3)
    ]
    [job] = summarize_steps(dumps)
    slowest = job.steps[0].slowest
    assert slowest is not None
    assert (slowest.rank, slowest.part) == (1, "outside of forward, backward and optimizer")


def test_equal_ranks_have_no_slowest(tmp_path: Path) -> None:
    dumps = [scripted_dump(tmp_path, step(1, 0), rank=r, size=2) for r in range(2)]
    [job] = summarize_steps(dumps)
    assert job.steps[0].slowest is None
    assert job.slowest_line().startswith("No rank is slower")


def test_steps_that_the_ring_has_lost_in_part_are_left_out(tmp_path: Path) -> None:
    events = [event for number in range(20) for event in step(number, 40 * number)]
    dump = scripted_dump(tmp_path, events, events=64)
    [job] = summarize_steps([dump])
    # the last 64 events hold four steps of 15 events
    assert [each.step for each in job.steps] == [16, 17, 18, 19]
    assert job.lost_events == dump.lost > 0
    assert all(each.ranks[0].compute_s == pytest.approx(33e-3) for each in job.steps)


def test_accumulation_makes_one_step_of_several_passes(tmp_path: Path) -> None:
    events = in_order(
        phase("forward", 1, 0, 10),
        phase("backward", 1, 10, 20),
        phase("forward", 1, 22, 30),
        phase("backward", 1, 30, 40),
        phase("optimizer", 1, 40, 45),
    )
    [job] = summarize_steps([scripted_dump(tmp_path, events)])
    [found] = job.steps
    assert found.ranks[0].step_s == pytest.approx(45e-3)
    assert found.ranks[0].compute_s == pytest.approx(43e-3)


def test_medians_are_over_steps_and_jobs_are_apart(tmp_path: Path) -> None:
    long = [*step(1, 0), *step(2, 40), *step(3, 80, backward=30)]
    dumps = [
        scripted_dump(tmp_path, long, job="a", size=2),
        scripted_dump(tmp_path, step(1, 0), job="b"),
    ]
    a, b = summarize_steps(dumps)
    [(steps, medians)] = a.medians()
    assert steps == 3 and medians.phases_s["backward"] == pytest.approx(20e-3)
    assert a.missing_ranks == (1,) and b.missing_ranks == ()
    assert len(b.steps) == 1


def test_a_step_in_progress_is_not_counted(tmp_path: Path) -> None:
    """Tests that the summary omits a second step of which only the forward pass has run."""
    events = in_order(
        phase("forward", 1, 0, 10),
        phase("backward", 1, 10, 30),
        phase("optimizer", 1, 30, 35),
        phase("forward", 2, 35, 45),
    )
    [job] = summarize_steps([scripted_dump(tmp_path, events)])
    assert [each.step for each in job.steps] == [1]
