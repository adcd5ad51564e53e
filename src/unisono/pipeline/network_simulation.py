"""Simulation of a pipeline schedule on a network: ranks compute passes, messages share links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from unisono.pipeline.pipeline_schedule import ACTIVATION, GRADIENT, PipelineSchedule
from unisono.pipeline.task_simulation import (
    StageTask,
    TaskRun,
    TaskSpan,
    predecessors,
    run_tasks,
)
from unisono.simulator import Compute, Conditions, Message, Order, Result, simulate
from unisono.topology import Topology


@dataclass(frozen=True, kw_only=True)
class PipelineSimulation:
    """A pipeline schedule on a network. Times in seconds."""

    run: TaskRun
    """The passes on the network."""
    ideal: TaskRun
    """The passes if messages take no time."""
    result: Result
    """The steps of all messages, and the use of links."""

    @property
    def exposed_s(self) -> float:
        """Seconds by which the messages lengthen the step."""
        return self.run.makespan_s - self.ideal.makespan_s


def simulate_pipeline(
    schedule: PipelineSchedule,
    topology: Topology,
    *,
    conditions: Conditions | None = None,
    bins: int = 0,
) -> PipelineSimulation:
    """Simulates a pipeline schedule on a network. Rank r of the pipeline is the network's rank r.

    A rank continues to compute while its messages are sent. Messages between two ranks leave one
    after another, in the order of the passes, as on one connection; `conditions.order` is not used.
    `bins` has the same meaning as in `simulate`. Raises `UnsupportedError` if the network has too
    few ranks.

    >>> from unisono import topology
    >>> orders = [[(StageTask(kind, 0, stage),) for kind in "FB"] for stage in (0, 1)]
    >>> schedule = PipelineSchedule.of(
    ...     "1f1b", orders, forward_s=1.0, backward_s=2.0, activation_bytes=1e9
    ... )
    >>> net = topology.parse("ring:2,bandwidth=1GB,latency=0s")
    >>> found = simulate_pipeline(schedule, net)
    >>> found.run.makespan_s, found.ideal.makespan_s
    (8.0, 6.0)
    """
    jobs = list(_jobs(schedule))
    conditions = replace(conditions or Conditions(), order=Order.STREAMS)
    result = simulate(jobs, topology, conditions=conditions, bins=bins)
    times = {job.name: job for job in result.jobs}
    spans = tuple(
        tuple(
            TaskSpan(task, times[task.text].begun_s, times[task.text].ended_s)
            for group in order
            for task in group
        )
        for order in schedule.ranks
    )
    return PipelineSimulation(
        run=TaskRun(spans=spans),
        ideal=run_tasks(schedule.ranks, schedule.seconds),
        result=result,
    )


def _jobs(schedule: PipelineSchedule) -> Iterator[Compute | Message]:
    """Yields a computation for each pass, and a message for each value that another rank needs.

    A value that the same rank needs has no job: the rank's passes run in order, and the schedule
    has checked this order.
    """
    rank_of = {
        task: rank for rank, order in enumerate(schedule.ranks) for group in order for task in group
    }
    sources: dict[StageTask, StageTask] = {}
    targets: dict[StageTask, StageTask] = {}
    for task, rank in rank_of.items():
        for source in predecessors(task, len(schedule.stages)):
            if rank_of.get(source, rank) != rank:
                sources[task], targets[source] = source, task
    for rank, order in enumerate(schedule.ranks):
        before: tuple[str, ...] = ()
        for group in order:
            before += tuple(_message_name(sources[task], task) for task in group if task in sources)
            for task in group:
                yield Compute(
                    name=task.text, seconds=schedule.seconds(task), ranks=(rank,), after=before
                )
                before = (task.text,)
            for task in group:
                if (target := targets.get(task)) is not None:
                    yield Message(
                        name=_message_name(task, target),
                        src=rank,
                        dst=rank_of[target],
                        nbytes=schedule.message_bytes(
                            ACTIVATION if task.kind == "F" else GRADIENT, task.stage
                        ),
                        after=before,
                    )


def _message_name(source: StageTask, target: StageTask) -> str:
    return f"{source.text} to {target.text}"
