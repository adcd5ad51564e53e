"""The pipeline schedule of a training run as data, with the measured times of its passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from unisono.pipeline import (
    PipelineSchedule,
    StageMessage,
    StageTimes,
    TaskGroup,
    TaskSpan,
)

MessageBytes = tuple[int, int]
"""Bytes of a stage's results, and of the results that need a gradient, for one microbatch."""


def measured_schedule(
    name: str,
    tasks: Sequence[Sequence[TaskGroup]],
    spans: Sequence[TaskSpan],
    result_bytes: Mapping[int, MessageBytes],
) -> PipelineSchedule:
    """Returns a schedule with the median time of each stage's passes, and the stages' messages.

    `spans`: the measured passes, in seconds. `result_bytes`: the bytes that each stage sends to the
    next stage. Half of the time of a whole backward pass counts for the gradients of inputs, and
    half for those of weights.
    """
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for task, begin_s, end_s in spans:
        times[task.stage, task.kind].append(end_s - begin_s)
    count = 1 + max(stage for stage, _ in times)
    messages = []
    for stage in range(count - 1):
        activation, gradient = result_bytes[stage]
        for kind, a, b, size in (
            ("activation", stage, stage + 1, activation),
            ("gradient", stage + 1, stage, gradient),
        ):
            messages.append(StageMessage(kind=kind, from_stage=a, to_stage=b, nbytes=size))
    return PipelineSchedule(
        name=name,
        stages=tuple(_stage_times(times, stage) for stage in range(count)),
        messages=tuple(messages),
        ranks=tuple(map(tuple, tasks)),
    )


def _stage_times(times: Mapping[tuple[int, str], list[float]], stage: int) -> StageTimes:
    half_s = median(times.get((stage, "B"), [0.0])) / 2
    return StageTimes(
        forward_s=median(times[stage, "F"]),
        input_gradient_s=median(times.get((stage, "I"), [half_s])),
        weight_gradient_s=median(times.get((stage, "W"), [half_s])),
    )
