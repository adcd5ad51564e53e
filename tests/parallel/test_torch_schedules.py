"""Torch's pipeline schedules as data, compared with closed forms of their bubbles."""

from __future__ import annotations

import pytest

from unisono import pipeline, topology
from unisono.parallel import Layout, pipeline_schedule

# The bubble for passes F = I = W = 1 of a rank, in multiples of p - 1: GPipe and 1F1B (F + I + W);
# interleaved half of it for two chunks; ZB1P F + I - W; ZB-V F / 2; DualPipeV F&B + B - 3 W of a
# chunk, of which a rank has two.
BUBBLES = {
    ("gpipe", 1): 3.0,
    ("1f1b", 1): 3.0,
    ("interleaved", 2): 1.5,
    ("1f1b", 2): 1.5,
    ("zb1p", 1): 1.0,
    ("zbv", 1): 0.5,
    ("dualpipev", 1): 1.0,
}


@pytest.mark.parametrize(("name", "chunks"), BUBBLES)
def test_bubbles_on_a_network_without_bytes(name: str, chunks: int) -> None:
    for stages, microbatches in ((2, 8), (4, 16)):
        schedule = pipeline_schedule(
            Layout(pp=stages, vpp=chunks, schedule=name),
            microbatches=microbatches,
            forward_s=1.0,
            backward_s=2.0,
        )
        found = pipeline.simulate_pipeline(schedule, topology.ring(stages))
        bubble_s = (stages - 1) * BUBBLES[name, chunks]
        assert found.run.makespan_s == 3 * microbatches + bubble_s
        assert found.run.busy_s == (3.0 * microbatches,) * stages
        assert pipeline.PipelineSchedule.from_document(schedule.to_document()) == schedule


@pytest.mark.parametrize(("name", "chunks"), BUBBLES)
def test_the_table_describes_the_order_of_torch(name: str, chunks: int) -> None:
    """Tests the bubble of the table, in units of the three passes, and the chunks that a rank
    keeps until their weight gradients.
    """
    assert {each for each, _ in BUBBLES} == set(pipeline.SCHEDULES)
    rules = pipeline.SCHEDULES[name]
    for stages, microbatches in ((2, 8), (4, 16)):
        size = pipeline.PipelineSize(stages, 2 if rules.is_v else chunks, microbatches)
        assert 3 * rules.bubble(size, 0.0) == pytest.approx(BUBBLES[name, chunks])
        layout = Layout(pp=stages, vpp=chunks, schedule=name)
        orders = pipeline_schedule(layout, microbatches=microbatches).ranks
        for rank, order in enumerate(orders):
            kept = most = 0
            for kind in (task.kind for group in order for task in group):
                kept += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
                most = max(most, kept)
            assert most <= rules.kept(size, rank)
            assert most == rules.kept(size, rank) or name in ("zb1p", "zbv", "dualpipev")


def test_bytes_of_all_schedules_are_those_of_the_boundaries_between_ranks() -> None:
    """A stage sends to its neighbour, except across the turn of a V, which one rank holds."""
    for name, chunks, crossings in (("interleaved", 2, 7), ("zbv", 1, 6), ("1f1b", 1, 3)):
        schedule = pipeline_schedule(
            Layout(pp=4, vpp=chunks, schedule=name), microbatches=4, activation_bytes=1000
        )
        steps = pipeline.simulate_pipeline(schedule, topology.ring(4)).result.steps
        assert steps.bytes[steps.messages()].sum() == 2 * 4 * crossings * 1000


def test_refusals() -> None:
    with pytest.raises(ValueError, match="dualpipev with pp = 4 needs at least 8 microbatches"):
        pipeline_schedule(Layout(pp=4, schedule="dualpipev"), microbatches=4)
    with pytest.raises(ValueError, match="microbatches: expected at least 1, got 0"):
        pipeline_schedule(Layout(pp=2), microbatches=0)
