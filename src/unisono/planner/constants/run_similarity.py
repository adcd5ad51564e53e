"""The properties of a run that determine the error of its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import Workload


class RunSimilarity(NamedTuple):
    """Properties of a run: device and software, model, and work of each device.

    Runs that differ only in data parallelism and batch have the same work.
    """

    machine: tuple[str, str]
    model: Transformer
    work: tuple[object, ...]

    def shared(self, other: RunSimilarity, shares: Mapping[str, float]) -> float:
        """Returns the correlation of the errors of two runs: the sum of the `shares` of those
        properties that are equal in both runs.
        """
        if self.machine != other.machine:
            return 0.0
        if self.model != other.model:
            return shares["machine"]
        more = shares["work"] if self.work == other.work else 0.0
        return shares["machine"] + shares["model"] + more


def similarity(
    model: Transformer, cluster: Cluster, layout: Layout, job: Workload
) -> RunSimilarity:
    """Returns the properties of a run that determine its prediction's error.

    >>> from unisono.planner import Cluster, Layout, Transformer, Workload
    >>> gpt = Transformer(layers=2, hidden=8, heads=2, vocab=10)
    >>> def run(devices: int, tp: int, seq: int) -> RunSimilarity:
    ...     layout = Layout(dp=devices // tp, tp=tp)
    ...     job = Workload(seq=seq, global_batch=8, micro_batch=1, recompute="none")
    ...     return similarity(gpt, Cluster(device="a100", devices=devices), layout, job)
    >>> run(4, 1, 64) == run(8, 1, 64), run(4, 1, 64).work == run(4, 2, 64).work
    (True, False)
    """
    return RunSimilarity(
        (cluster.kind.name, job.software_of(layout.zero)),
        model,
        (
            layout.tp,
            layout.pp,
            layout.cp,
            layout.ep,
            layout.vpp,
            layout.sequence_parallel,
            layout.zero,
            layout.schedule,
            job.seq,
            job.micro_batch,
            job.recompute,
            job.precision,
            *((layout.tensor,) if layout.tensor != "1d" else ()),
        ),
    )
