"""Pipeline schedules on a network, compared with closed forms and with the simulation of tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import pipeline, topology
from unisono.errors import UnsupportedError
from unisono.pipeline import PipelineSchedule, StageTask, TaskGroup
from unisono.simulator import Conditions, Traffic

counts = {"stages": st.integers(1, 4), "rounds": st.integers(1, 3)}
times = st.integers(1, 640).map(lambda n: n / 64)  # sums of these are exact in floating point
kinds = st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb1p", 1)])


def _orders(name: str, stages: int, microbatches: int, chunks: int = 1) -> list[list[TaskGroup]]:
    return pipeline.stage_tasks(name, stages=stages, microbatches=microbatches, chunks=chunks)


def _schedule(name: str, stages: int, microbatches: int, **sizes: float) -> PipelineSchedule:
    return PipelineSchedule.of(name, _orders(name, stages, microbatches), **sizes)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(**counts, forward_s=times, backward_s=times, kind=kinds)
def test_without_bytes_the_network_takes_no_time(
    stages: int, rounds: int, forward_s: float, backward_s: float, kind: tuple[str, int]
) -> None:
    name, chunks = kind
    schedule = PipelineSchedule.of(
        name,
        _orders(name, stages, stages * rounds, chunks),
        forward_s=forward_s,
        backward_s=backward_s,
    )
    found = pipeline.simulate_pipeline(schedule, topology.ring(max(stages, 2)))
    assert found.run == pipeline.run_tasks(schedule.ranks, schedule.seconds)
    assert found.exposed_s == 0
    if name in ("gpipe", "1f1b"):
        microbatches = stages * rounds
        whole_s = (microbatches + stages - 1) * (forward_s + backward_s)
        assert found.run.makespan_s == whole_s
        assert found.run.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@settings(max_examples=20)
@given(stages=st.integers(2, 4), rounds=st.integers(1, 3), kind=kinds)
def test_messages_on_free_links_take_their_bytes_and_latency(
    stages: int, rounds: int, kind: tuple[str, int]
) -> None:
    """Compares with tasks whose results travel for a fixed time. A message of 0.25 s leaves its
    link before the next pass of 0.5 s or more ends, so messages do not meet.
    """
    name, chunks = kind
    orders = _orders(name, stages, stages * rounds, chunks)
    schedule = PipelineSchedule.of(
        name, orders, forward_s=1.0, backward_s=2.0, activation_bytes=0.25e9
    )
    net = topology.parse(f"mesh:{stages},bandwidth=1GB,latency=10ms")
    found = pipeline.simulate_pipeline(schedule, net)
    sent = pipeline.run_tasks(orders, schedule.seconds, send_s=0.25 + 0.01)
    assert found.run.makespan_s == pytest.approx(sent.makespan_s)
    assert found.exposed_s == pytest.approx(sent.makespan_s - found.ideal.makespan_s)


def test_a_slow_link_delays_each_message_by_the_earlier_ones() -> None:
    """Passes of 1 s and messages of 3 s: the link is busy all the time, first one way, then back.
    Microbatch i arrives at 1 + 3 (i + 1).
    """
    schedule = _schedule("gpipe", 2, 4, forward_s=1.0, backward_s=1.0, activation_bytes=3e9)
    net = topology.parse("mesh:2,bandwidth=1GB,latency=0s")
    found = pipeline.simulate_pipeline(schedule, net)
    begins = [span.begin_s for span in found.run.spans[1] if span.task.kind == "F"]
    assert begins == pytest.approx([4, 7, 10, 13])
    # The gradients leave from 15 on, one each 3 s; the last pass takes 1 s.
    assert found.run.makespan_s == pytest.approx(15 + 4 * 3 + 1)
    assert found.ideal.makespan_s == 10
    assert found.run.bubble == pytest.approx(1 - 8 / 28)
    steps = found.result.steps
    assert sum(steps.bytes[steps.messages()]) == 2 * 4 * 3e9


def test_other_traffic_takes_half_of_a_link() -> None:
    """The other traffic goes from rank 0 to rank 1, so only the activation takes twice as long."""
    orders: list[list[TaskGroup]] = [
        [(StageTask("F", 0, 0),), (StageTask("B", 0, 0),)],
        [(StageTask("F", 0, 1), StageTask("B", 0, 1))],
    ]
    schedule = PipelineSchedule.of(
        "one", orders, forward_s=1.0, backward_s=2.0, activation_bytes=1e9
    )
    net = topology.parse("mesh:2,bandwidth=1GB,latency=0s")
    busy = Conditions(traffic=(Traffic(src=0, dst=1),))
    other = pipeline.simulate_pipeline(schedule, net, conditions=busy)
    assert pipeline.simulate_pipeline(schedule, net).run.makespan_s == pytest.approx(
        1 + 1 + 3 + 1 + 2
    )
    assert other.run.makespan_s == pytest.approx(1 + 2 + 3 + 1 + 2)  # half of the rate, forward


def test_a_file_keeps_the_schedule(tmp_path: Path) -> None:
    orders: list[list[TaskGroup]] = [
        [(StageTask("F", 0, 0),), (StageTask("I", 0, 0), StageTask("W", 0, 0))],
        [(StageTask("F", 0, 1),), (StageTask("B", 0, 1),)],
    ]
    schedule = PipelineSchedule.of(
        "mine", orders, forward_s=1.0, backward_s=3.0, weight_share=0.25, activation_bytes=5
    )
    schedule.save(tmp_path / "mine.json")
    assert PipelineSchedule.load(tmp_path / "mine.json") == schedule
    document = json.loads((tmp_path / "mine.json").read_text())
    assert document["ranks"] == [["0F0", ["0I0", "0W0"]], ["1F0", "1B0"]]
    assert document["stages"][1] == {
        "forward_s": 1.0,
        "input_gradient_s": 2.25,
        "weight_gradient_s": 0.75,
    }
    assert document["messages"] == [
        {"kind": "activation", "from_stage": 0, "to_stage": 1, "bytes": 5},
        {"kind": "gradient", "from_stage": 1, "to_stage": 0, "bytes": 5},
    ]


def _change(document: dict[str, Any], path: tuple[Any, ...], value: object) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        (("ranks",), 3, "ranks must be a list, not 3"),
        (("ranks", 0, 0), "F0", "'F0': expected a pass as STAGE, F, B, I or W, MICROBATCH"),
        (("ranks", 0, 0), "2F0", "2F0: the schedule has 2 stages, from 0 on"),
        (("ranks", 0, 0), "0B0", "0B0 occurs twice"),
        (
            ("ranks", 0),
            ["0F0"],
            "stage 0 must run F and B, or F, I and W, of microbatch 0; found F",
        ),
        (("ranks", 0), [], "rank 0 has no passes"),
        (("ranks", 1, 0), "0F0", "stage 0 runs on rank 0 and on rank 1; expected one rank"),
        (("ranks", 0), ["0B0", "0F0"], "the tasks of the schedule wait for each other"),
        (("stages", 0, "forward_s"), -1, "forward_s must be a number of seconds of at least 0"),
        (("stages", 0), {}, "stage 0 is a JSON object with forward_s, input_gradient_s"),
        (("messages", 0, "to_stage"), 0, "the activation of stage 0 goes to stage 1, not 0"),
        (("messages", 0, "kind"), "weight", "an activation or a gradient, not 'weight'"),
        (("messages", 0, "bytes"), "4K", "bytes must be a number of at least 0, not '4K'"),
        (
            ("messages", 0),
            None,
            "a message is a JSON object with kind, from_stage, to_stage, bytes",
        ),
        (("name",), "x", "a pipeline schedule is a JSON object with pipeline, stages"),
    ],
)
def test_refused_documents(path: tuple[Any, ...], value: object, error: str) -> None:
    document = _schedule("1f1b", 2, 1, forward_s=1.0, backward_s=2.0).to_document()
    _change(document, path, value)
    with pytest.raises(ValueError, match=error):
        PipelineSchedule.from_document(document)


def test_refusals() -> None:
    schedule = _schedule("1f1b", 3, 1, forward_s=1.0, backward_s=2.0)
    with pytest.raises(UnsupportedError, match="needs ranks"):
        pipeline.simulate_pipeline(schedule, topology.ring(2))
