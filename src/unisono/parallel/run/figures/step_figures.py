"""The figures of a run's last step: bytes, memory and times, predicted and measured.

The predicted bytes are those of closed forms. With n ranks and N bytes, a rank sends 2 (n-1)/n N
bytes in a sum (all_reduce), and (n-1)/n N bytes in a gather or a reduce_scatter. docs/parallel.md
lists the closed forms of each strategy. Modules that communicate compute their own bytes; see
`Exchanging`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from unisono.parallel.divisible.interfaces import MicrobatchPart, exchanging
from unisono.parallel.precision import Precision
from unisono.parallel.run.batch.batch_parts import BatchPart
from unisono.parallel.run.figures.run_report import (
    RunReport,
    make_report,
    memory_by_kind,
    predicted_memory,
)
from unisono.parallel.run.parameters.fully_sharded_set import frozen_traffic, gather_traffic
from unisono.parallel.run.parameters.gathered_module import GatheredModule
from unisono.parallel.run.parameters.optimizers import Optimizers
from unisono.parallel.run.parameters.parameter_sets import HeldParameter, ParameterSet
from unisono.parallel.run.pipeline.model_stages import stage_count, stages_of_rank
from unisono.parallel.run.pipeline.pipeline_runner import PipelineRunner
from unisono.parallel.run.pipeline.schedules import (
    MessageBytes,
    measured_schedule,
    run_equal_passes,
    run_like,
)
from unisono.parallel.run.pipeline.stage_messages import HEADER_BYTES
from unisono.parallel.run.step.batch_passes import BatchPasses
from unisono.parallel.training_mesh import TrainingMesh
from unisono.pipeline import PipelineSchedule, TaskGroup, TaskRun


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """The size of a step on one rank."""

    parts: tuple[MicrobatchPart, ...]
    """This rank's microbatches."""
    regathers: Mapping[int, int] = field(default_factory=dict)
    """By stage: how many times a pipeline gathers weights that ZeRO-2 or ZeRO-3 split, after the
    first time in a step."""
    result_bytes: Mapping[int, MessageBytes] = field(default_factory=dict)
    """By stage of the pipeline: the sizes of the last step's results."""


def predicted_bytes(
    stages: Sequence[tuple[int, nn.Module]],
    sets: Sequence[ParameterSet],
    mesh: TrainingMesh,
    size: StepSize,
    precision: Precision,
) -> dict[str, float]:
    """Returns the bytes that this rank sends, under the group names of `TrainingMesh.bytes_sent`.

    The bytes of messages of pipelines, and of exchanges whose sizes the values of a batch
    determine, come from the last step.
    """
    found: defaultdict[str, float] = defaultdict(float)

    def add(sent: Mapping[str, float], times: int = 1) -> None:
        for name, nbytes in sent.items():
            found[mesh.counted_as(name)] += nbytes * times

    for each in sets:
        add(each.traffic(len(size.parts)))
    for number, stage in stages:
        add(gather_traffic(stage, mesh, precision), size.regathers.get(number, 0))
        add({"pp": _messages(number, mesh, size)})
        for module in exchanging(stage):
            add(module.bytes_sent(size.parts))
    return dict(found)


def _messages(number: int, mesh: TrainingMesh, size: StepSize) -> int:
    """Returns the bytes of a stage's messages to other ranks: results, gradients and a header."""
    own = stages_of_rank(mesh.layout, mesh.coordinates["pp"]) if mesh.layout.pp > 1 else [0]
    neighbours = {number - 1, number + 1} - set(own) - {-1, stage_count(mesh.layout)}
    _, gradients = size.result_bytes.get(number - 1, (0, 0))
    results, _ = size.result_bytes.get(number, (0, 0))
    sent = gradients * (number - 1 in neighbours) + results * (number + 1 in neighbours)
    return sent * len(size.parts) + HEADER_BYTES * (number + 1 in neighbours)


class StepFigures:
    """Gathers the figures of all ranks. All methods are collective."""

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        sets: Sequence[ParameterSet],
        frozen: Sequence[HeldParameter],
        mesh: TrainingMesh,
        *,
        optimizers: Optimizers,
        groups: Sequence[Sequence[str]],
        gathered: Sequence[GatheredModule],
        passes: BatchPasses,
        precision: Precision,
    ) -> None:
        """`groups`: the parameters of each group of the optimizers. `gathered`: the modules that
        gather parameters."""
        self._stages, self._sets, self._frozen, self._mesh = stages, sets, frozen, mesh
        self._optimizers, self._groups = optimizers, groups
        self._gathered, self._clock, self._passes = gathered, passes.clock, passes
        self._precision = precision

    @property
    def _pipeline(self) -> PipelineRunner | None:
        return self._passes.pipeline

    def report(
        self,
        part: BatchPart,
        *,
        steps: int,
        step_s: list[float],
        sent: Mapping[str, int],
        exchanged_s: tuple[float, float],
    ) -> RunReport:
        """Returns the figures of a step on this rank's part of a batch.

        `steps`: the number of steps so far, and `step_s` the seconds of each. `sent`: the bytes
        that this rank sent in the step, by group. `exchanged_s`: see `RunTimeline`.
        """
        mesh = self._mesh
        tasks = self._pipeline.tasks() if self._pipeline is not None else []
        figures = {
            "pipeline": mesh.ranks("pp"),
            "steps": steps,
            "step_s": step_s,
            "tokens": part.samples * part.microbatches[0].positions * mesh.layout.cp,
            "busy_s": self._clock.busy_s,
            "span": self._clock.span,
            "bytes_sent": sent,
            "exchanged_s": exchanged_s,
            "placement": mesh.explain(),
            "memory": memory_by_kind(self._sets, self._frozen, self._optimizers),
            "predicted_bubble": run_equal_passes(tasks).bubble if tasks else 0.0,
            "predicted_bytes": self._predicted_bytes(part),
            "predicted_memory": predicted_memory(
                self._sets, self._frozen, mesh, self._optimizers, self._groups
            ),
        }
        return make_report(mesh.layout, mesh.of_all_ranks(figures))

    def _predicted_bytes(self, part: BatchPart) -> dict[str, float]:
        size = self._size(part)
        mesh, precision = self._mesh, self._precision
        found = defaultdict(float, predicted_bytes(self._stages, self._sets, mesh, size, precision))
        count = len(size.parts)
        gathers = frozen_traffic(self._frozen, self._gathered, mesh, count, precision)
        for name, sent in gathers.items():
            found[mesh.counted_as(name)] += sent
        return dict(found)

    def _result_bytes(self) -> dict[int, MessageBytes]:
        """Returns the sizes of the results of each stage of this rank's pipeline."""
        if self._pipeline is None:
            return {}
        found = self._mesh.of_all_ranks(self._pipeline.result_bytes())
        return {
            stage: sizes for rank in self._mesh.ranks("pp") for stage, sizes in found[rank].items()
        }

    def _size(self, part: BatchPart) -> StepSize:
        held = [*self._frozen, *(each for found in self._sets for each in found.held)]
        kept = (held[0].values if held else torch.empty(0)).dtype
        item_bytes, wide_bytes = self._precision.computed(kept).itemsize, self._wide(kept).itemsize
        return StepSize(
            parts=part.parts(item_bytes=item_bytes, wide_bytes=wide_bytes),
            regathers=self._pipeline.regathers() if self._pipeline else {},
            result_bytes=self._result_bytes(),
        )

    def _wide(self, kept: torch.dtype) -> torch.dtype:
        """Returns the type of losses, routers and attention over divided sequences."""
        computed = self._precision.computed(kept)
        narrow = self._precision.is_narrow
        return torch.promote_types(computed, torch.float32) if narrow else computed

    def passes(self) -> dict[str, TaskRun]:
        """Returns the passes of rank 0's pipeline, measured and predicted."""
        found = self._mesh.of_all_ranks(self._clock.spans)
        rows = [found[rank] for rank in self._mesh.grid.group(0, "pp")]
        tasks: list[list[TaskGroup]] = [[(span.task,) for span in row] for row in rows]
        if self._pipeline is not None:
            tasks = self._pipeline.tasks()
        predicted = run_like(tasks, [span for row in rows for span in row])
        return {"predicted": predicted, "measured": TaskRun(spans=tuple(map(tuple, rows)))}

    def pipeline_schedule(self) -> PipelineSchedule:
        """Returns the schedule of rank 0's pipeline with measured times and messages.

        Raises `ValueError` without a pipeline.
        """
        if self._pipeline is None:
            raise ValueError("pipeline_schedule: expected a layout with pp > 1, got pp = 1")
        found = self._mesh.of_all_ranks((self._clock.spans, self._pipeline.result_bytes()))
        ranks = [found[rank] for rank in self._mesh.grid.group(0, "pp")]
        return measured_schedule(
            self._mesh.layout.schedule,
            self._pipeline.tasks(),
            [span for spans, _ in ranks for span in spans],
            {stage: sizes for _, results in ranks for stage, sizes in results.items()},
        )
