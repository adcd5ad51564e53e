"""A forecast of a training step's time, from profiles of the model with one and two layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed as dist

from unisono.native import usable_cores
from unisono.parallel.run import ParallelRun
from unisono.parallel.run.pipeline.model_stages import stage_count
from unisono.pipeline import StageTask, run_tasks
from unisono.planner import Layout

_WARM_UP, _BLOCKS, _STEPS = 3, 5, 5

Measured = TypeVar("Measured")
RunBuilder = Callable[[int, Layout, int], ParallelRun]
"""Builds the run of a model with a number of layers, a layout, and a number of microbatches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepForecast:
    """Seconds of a step, forecast before the step runs: the sum of its parts."""

    layers_s: float
    """Forward and backward passes of a rank's layers, with their exchanges."""
    ends_s: float
    """Embedding, output and loss, and what a step does once."""
    waits_s: float
    """Waiting time in a pipeline: for other stages, for a core, and for the schedule's own code."""
    update_s: float
    """Time to sum and clip gradients and to step the optimizer, in a pipeline. Without a pipeline
    it is 0, since `layers_s` and `ends_s` contain this time."""

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.layers_s + self.ends_s + self.waits_s + self.update_s


def forecast_step(
    build: RunBuilder,
    layout: Layout,
    *,
    layers: int,
    microbatches: int,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> StepForecast:
    """Returns the forecast of a step on a batch, the same on all ranks. Collective.

    The profile trains the model with one layer and with two layers, in turns. The difference is the
    time of a layer, so a model of any depth follows. `build` makes the runs; they are closed
    afterwards. With a pipeline, all ranks profile as one stage, and the schedule then runs with
    the times of its stages, where ranks share the cores of the machine.
    """
    profile = _Profile(build, microbatches, inputs, targets)
    if layout.pp == 1:
        one, two = profile.step_times(layout)
        return StepForecast(
            layers_s=layers * (two - one), ends_s=2 * one - two, waits_s=0.0, update_s=0.0
        )
    return _pipeline_forecast(profile, layout, layers)


class _PassTimes(NamedTuple):
    """Seconds of a forward and of a backward pass of a microbatch."""

    forward_s: float
    backward_s: float


class _Profile(NamedTuple):
    """The run that trains in a profile."""

    build: RunBuilder
    microbatches: int
    inputs: torch.Tensor
    targets: torch.Tensor

    def run(self, layers: int, layout: Layout) -> ParallelRun:
        return self.build(layers, layout, self.microbatches)

    def train_in_turns(self, runs: Sequence[ParallelRun]) -> Iterator[int]:
        """Trains the runs in turns. Yields the index of a run after each of its steps that
        counts."""
        for repeat in range(_WARM_UP + _BLOCKS * _STEPS):
            for index, run in enumerate(runs):
                run.step(self.inputs, self.targets)
                if repeat >= _WARM_UP:
                    yield index

    def measured(
        self, layout: Layout, measure: Callable[[ParallelRun], Measured]
    ) -> tuple[list[Measured], list[Measured]]:
        """Returns what is measured after each step with one layer, and with two layers."""
        runs = [self.run(layers, layout) for layers in (1, 2)]
        found: tuple[list[Measured], list[Measured]] = ([], [])
        for index in self.train_in_turns(runs):
            found[index].append(measure(runs[index]))
        for run in runs:
            run.mesh.close()
        return found

    def step_times(self, layout: Layout) -> tuple[float, float]:
        """Returns the seconds of a step with one layer and with two layers."""
        one, two = self.measured(layout, lambda run: run.step_s[-1])
        return _undisturbed_s(one), _undisturbed_s(two)

    def pass_times(self, layout: Layout) -> tuple[_PassTimes, _PassTimes]:
        """Returns the times of a pass through a layer, and through embedding, output and loss."""

        def measure(run: ParallelRun) -> tuple[float, float]:
            begin_s, end_s = run.clock.span
            return (end_s - begin_s) / self.microbatches, _forward_share(run)

        columns = [tuple(zip(*each, strict=True)) for each in self.measured(layout, measure)]
        one, two = (_undisturbed_s(times) for times, _ in columns)
        shares = [_mean(median(each)) for _, each in columns]
        layer_s, ends_s = two - one, max(2 * one - two, 0.0)
        layer_forward_s = min(max(two * shares[1] - one * shares[0], 0.0), layer_s)
        ends_forward_s = min(max(one * shares[0] - layer_forward_s, 0.0), ends_s)
        return (
            _PassTimes(layer_forward_s, layer_s - layer_forward_s),
            _PassTimes(ends_forward_s, ends_s - ends_forward_s),
        )


def _forward_share(run: ParallelRun) -> float:
    """Returns the share of forward passes in the time of all passes of the last step."""
    times = {"F": 0.0, "B": 0.0}
    for task, begin_s, end_s in run.clock.spans:
        times[task.kind] += end_s - begin_s
    return times["F"] / (times["F"] + times["B"])


class _StageTimes(NamedTuple):
    """Times of the passes through a layer and through the model's ends, on a core of its own."""

    layer: _PassTimes
    ends: _PassTimes

    def passes_s(self, run: ParallelRun, cores: float) -> float:
        """Returns the simulated seconds of all passes of a pipeline whose ranks share `cores`.

        Collective.
        """
        stages = _stage_layers(run)

        def seconds(task: StageTask) -> float:
            part = 0 if task.kind == "F" else 1
            found_s = stages[task.stage] * self.layer[part]
            if task.stage == len(stages) - 1:
                found_s += self.ends[part]
            return found_s * (0.5 if task.kind in ("I", "W") else 1.0)

        return run_tasks(run.tasks(), seconds, cores=cores).makespan_s


def _pipeline_forecast(profile: _Profile, layout: Layout, layers: int) -> StepForecast:
    inputs, targets = profile.inputs, profile.targets
    flat = replace(layout, pp=1, vpp=1, schedule="1f1b", dp=layout.dp * layout.pp)
    rows = len(inputs) // layout.dp * flat.dp  # keeps the size of a rank's microbatch
    take = torch.arange(rows) % len(inputs)
    # In the profile, all ranks compute at the same time and `crowd` ranks share a core. A pass that
    # has a core of its own takes 1 / `crowd` of the profiled time.
    crowd = max(1.0, dist.get_world_size() / usable_cores())
    found = profile._replace(inputs=inputs[take], targets=targets[take]).pass_times(flat)
    times = _StageTimes(*(_PassTimes(*(s / crowd for s in each)) for each in found))
    cores = layout.pp / crowd

    least = profile.run(stage_count(layout), layout)
    step_times = [least.step_s[-1] for _ in profile.train_in_turns([least])]
    least_s = _undisturbed_s(step_times) - _undisturbed_s(_update_times(least))
    factor = least_s / times.passes_s(least, cores)
    least.mesh.close()

    whole = profile.run(layers, layout)
    whole.step(inputs, targets)
    update_s = _undisturbed_s(_update_times(whole))
    passes_s = times.passes_s(whole, cores) * factor
    whole.mesh.close()
    layers_s = profile.microbatches * layers / layout.pp * sum(times.layer)
    ends_s = profile.microbatches / layout.pp * sum(times.ends)
    return StepForecast(
        layers_s=layers_s,
        ends_s=ends_s,
        waits_s=passes_s - layers_s - ends_s,
        update_s=update_s,
    )


def _stage_layers(probe: ParallelRun) -> list[int]:
    """Returns the number of layers of each stage of the pipeline. Collective."""
    own: Mapping[int, int] = {
        number: sum(name.startswith("layer") for name, _ in stage.named_children())
        for number, stage in probe.stages
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    merged = {number: count for each in found for number, count in each.items()}
    return [merged[number] for number in sorted(merged)]


def _update_times(probe: ParallelRun) -> list[float]:
    """Returns the seconds of each repeated update with the last step's gradients. Collective."""
    found = []
    for _ in range(_BLOCKS * _STEPS):
        dist.barrier()
        begin_s = time.perf_counter()
        probe.update([])
        found.append(time.perf_counter() - begin_s)
    return found


def _undisturbed_s(times: Sequence[float]) -> float:
    """Returns the smallest block median of the times, averaged over ranks. Collective.

    The times are cut into `_BLOCKS` blocks. Other programs disturb a shared machine for seconds at
    a time, but seldom during all blocks.
    """
    size = len(times) // _BLOCKS
    return _mean(min(median(times[i * size : (i + 1) * size]) for i in range(_BLOCKS)))


def _mean(value: float) -> float:
    """Returns the mean over all ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return fmean(found)
