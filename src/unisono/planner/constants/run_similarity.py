"""The properties of a run that determine the error of its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import EAGER, LOW_PRECISIONS, Workload

EVERY_RUN = ("source", "model", "work", "run")
"""Causes of the errors of all predictions: what is common to a source, to a model in a source, and
to equal work of each device, and the single run."""


class RunSimilarity(NamedTuple):
    """Properties of a run: device and software, model, and work of each device.

    Runs that differ only in data parallelism and batch have the same work. The last entry of `work`
    is the precision.
    """

    machine: tuple[str, str]
    model: Transformer
    work: tuple[object, ...]

    def variance(self, sigma: Mapping[str, float]) -> float:
        """Returns the variance of the error of the run. `sigma` has the standard deviations of the
        parts of errors.
        """
        names = (*EVERY_RUN, *self._causes())
        return sum(sigma[name] ** 2 for name in names)

    def covariance(self, other: RunSimilarity, sigma: Mapping[str, float]) -> float:
        """Returns the covariance of the errors of two runs of one source: the sum of the parts that
        both have in common.
        """
        if self.machine != other.machine:
            return 0.0
        found = sigma["source"] ** 2
        if self.model == other.model:
            common = set(self._causes()) & set(other._causes())
            found += sigma["model"] ** 2 + sum(sigma[name] ** 2 / 2 for name in common)
            if self.work == other.work:
                found += sigma["work"] ** 2
        return found

    def _causes(self) -> tuple[str, ...]:
        experts = ("experts",) if self.model.experts else ()
        return (*experts, "low precision") if self.work[-1] in LOW_PRECISIONS else experts


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
    # Megatron-LM of 2021 and 2022 differ only in the exchanges that they hide.
    software = job.software_of(layout, cluster.kind.architecture)
    return RunSimilarity(
        (cluster.kind.name, "megatron" if software in EAGER else software),
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
