"""The figures of a run's last step: bytes, memory and times, predicted and measured.

The predicted bytes are those of closed forms. With n ranks and N bytes, a rank sends 2 (n-1)/n N
bytes in a sum (all_reduce), and (n-1)/n N bytes in a gather or a reduce_scatter.
docs/parallel/strategies.md lists the closed forms of each strategy. Modules that communicate
compute their own bytes; see `Exchanging`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from unisono.parallel.divisible.interfaces import MicrobatchPart, exchanging
from unisono.parallel.run.batch.batch_parts import BatchPart
from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.figures.run_report import (
    RunReport,
    make_report,
    memory_by_kind,
    predicted_memory,
)
from unisono.parallel.run.parameters.fully_sharded_set import frozen_traffic, gather_traffic
from unisono.parallel.run.pipeline.model_stages import stage_count, stages_of_rank
from unisono.parallel.run.pipeline.schedules import (
    MessageBytes,
    measured_schedule,
    run_equal_passes,
    run_like,
)
from unisono.parallel.run.pipeline.stage_messages import HEADER_BYTES
from unisono.parallel.run.step.batch_passes import BatchPasses
from unisono.pipeline import PipelineSchedule, TaskRun


class StepFigures:
    """Gathers the figures of all ranks. All methods are collective."""

    def __init__(self, model: DividedModel, passes: BatchPasses) -> None:
        self._model, self._mesh = model, model.mesh
        self._passes, self._clock = passes, passes.clock

    def report(
        self,
        part: BatchPart,
        *,
        steps: int,
        step_s: list[float],
        sent: Mapping[str, int],
    ) -> RunReport:
        """Returns the figures of a step on this rank's part of a batch.

        `steps`: the number of steps so far, and `step_s` the seconds of each. `sent`: the bytes
        that this rank sent in the step, by group.
        """
        mesh, tasks = self._mesh, self._passes.tasks()
        figures = {
            "pipeline": mesh.ranks("pp"),
            "steps": steps,
            "step_s": step_s,
            "tokens": part.samples * part.microbatches[0].positions * mesh.layout.cp,
            "busy_s": self._clock.busy_s,
            "span": self._clock.span,
            "bytes_sent": sent,
            "exchanged_s": self._clock.exchanged_s,
            "placement": mesh.explain(),
            "memory": memory_by_kind(self._model),
            "predicted_bubble": run_equal_passes(tasks).bubble if tasks else 0.0,
            "predicted_bytes": self._predicted_bytes(part),
            "predicted_memory": predicted_memory(self._model),
        }
        return make_report(mesh.layout, mesh.of_all_ranks(figures))

    def _predicted_bytes(self, part: BatchPart) -> dict[str, float]:
        """Returns the bytes that this rank sends, under the names of `TrainingMesh.bytes_sent`.

        The bytes of messages of pipelines, and of exchanges whose sizes the values of a batch
        determine, come from the last step.
        """
        model, parts, pipeline = self._model, self._parts(part), self._passes.pipeline
        found: defaultdict[str, float] = defaultdict(float)

        def add(sent: Mapping[str, float], times: int = 1) -> None:
            for name, nbytes in sent.items():
                found[self._mesh.counted_as(name)] += nbytes * times

        for each in model.sets:
            add(each.traffic(len(parts)))
        add(frozen_traffic(model, len(parts)))
        results = self._result_bytes()
        regathers = {} if pipeline is None else pipeline.regathers()
        for number, stage in model.stages:
            add(gather_traffic(stage, self._mesh, model.precision), regathers.get(number, 0))
            add({"pp": self._message_bytes(number, results, len(parts))})
            for module in exchanging(stage):
                add(module.bytes_sent(parts))
        return dict(found)

    def _parts(self, part: BatchPart) -> tuple[MicrobatchPart, ...]:
        """Returns the size of this rank's part of each microbatch."""
        precision = self._model.precision
        held = [*self._model.frozen, *self._model.trained]
        item = precision.computed((held[0].values if held else torch.empty(0)).dtype)
        # the type of losses, routers and attention over divided sequences
        wide = torch.promote_types(item, torch.float32) if precision.is_narrow else item
        return tuple(
            MicrobatchPart(
                inputs=each.inputs,
                samples=each.passed,
                tokens=each.passed * each.positions,
                whole_samples=each.samples,
                item_bytes=item.itemsize,
                wide_bytes=wide.itemsize,
            )
            for each in part.microbatches
        )

    def _result_bytes(self) -> dict[int, MessageBytes]:
        """Returns the sizes of the results of each stage of this rank's pipeline."""
        pipeline = self._passes.pipeline
        found = [] if pipeline is None else self._mesh.of_all_ranks(pipeline.result_bytes())
        ranks = self._mesh.ranks("pp") if found else ()
        return {stage: sizes for rank in ranks for stage, sizes in found[rank].items()}

    def _message_bytes(self, number: int, results: Mapping[int, MessageBytes], count: int) -> int:
        """Returns the bytes of a stage's messages to other ranks: results, gradients and a header.

        `results`: the sizes of the results of each stage. `count`: the number of microbatches.
        """
        layout = self._mesh.layout
        own = stages_of_rank(layout, self._mesh.coordinates["pp"])
        neighbours = {number - 1, number + 1} - {*own, -1, stage_count(layout)}
        _, gradients = results.get(number - 1, (0, 0))
        sizes, _ = results.get(number, (0, 0))
        sent = gradients * (number - 1 in neighbours) + sizes * (number + 1 in neighbours)
        return sent * count + HEADER_BYTES * (number + 1 in neighbours)

    def passes(self) -> dict[str, TaskRun]:
        """Returns the passes of rank 0's pipeline, measured and predicted."""
        found = self._mesh.of_all_ranks(self._clock.spans)
        rows = [found[rank] for rank in self._mesh.grid.group(0, "pp")]
        tasks = self._passes.tasks() or [[(span.task,) for span in row] for row in rows]
        predicted = run_like(tasks, [span for row in rows for span in row])
        return {"predicted": predicted, "measured": TaskRun(spans=tuple(map(tuple, rows)))}

    def pipeline_schedule(self) -> PipelineSchedule:
        """Returns the schedule of rank 0's pipeline with measured times and messages.

        Raises `ValueError` without a pipeline.
        """
        pipeline = self._passes.pipeline
        if pipeline is None:
            raise ValueError("pipeline_schedule: expected a layout with pp > 1, got pp = 1")
        found = self._mesh.of_all_ranks((self._clock.spans, pipeline.result_bytes()))
        ranks = [found[rank] for rank in self._mesh.grid.group(0, "pp")]
        return measured_schedule(
            self._mesh.layout.schedule,
            self._passes.tasks(),
            [span for spans, _ in ranks for span in spans],
            {stage: sizes for _, results in ranks for stage, sizes in results.items()},
        )
