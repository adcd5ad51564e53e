"""The properties of a run that determine the error of its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import EAGER, LOW_PRECISIONS, Workload

EVERY_RUN = ("source", "model", "work", "run")
"""Causes of the errors of all predictions: what is common to a source, to a model in a source, to
equal work of each device, and the single run."""
FITTED_ARCHITECTURES = ("ampere", "hopper", "blackwell")
_OF_A_DEVICE = "other device"
"""A cause that all runs on a device have in common."""
_OF_A_MODEL = "experts"
"""A cause that is half common to a model in a source, and half of the single run. All other causes
that only some runs have are common to equal work."""


class RunSimilarity(NamedTuple):
    """Properties of a run: device and software, model, work of each device, and causes of errors.

    Runs that differ only in data parallelism and batch have the same work.
    """

    machine: tuple[str, str]
    model: Transformer
    work: tuple[object, ...]
    causes: tuple[str, ...]
    """The causes of `error_causes`."""

    def shared_variance(self, other: RunSimilarity, sigma: Mapping[str, float]) -> float:
        """Returns the covariance of the errors of two runs of one source, without the part of wrong
        constants: the sum of the variances of the parts that both have in common.

        `sigma` has the standard deviations of the parts of errors. The parts of the single run are
        not included, even if the properties are equal.
        """
        if self.machine != other.machine:
            return 0.0
        same_model = self.model == other.model
        same_work = same_model and self.work == other.work
        further = set(self.causes) & set(other.causes) - set(EVERY_RUN)
        found = sigma["source"] ** 2
        found += sigma["model"] ** 2 * same_model
        found += sigma["work"] ** 2 * same_work
        for name in further:
            if name == _OF_A_MODEL:
                found += sigma[name] ** 2 / 2 * same_model
            elif same_work or name == _OF_A_DEVICE:
                found += sigma[name] ** 2
        return found

    def single_variance(self, sigma: Mapping[str, float]) -> float:
        """Returns the variance of the parts that the run shares with no other run, except the part
        "run", whose scale differs between sources.
        """
        return sigma[_OF_A_MODEL] ** 2 / 2 if _OF_A_MODEL in self.causes else 0.0


def error_causes(model: Transformer, cluster: Cluster, job: Workload) -> tuple[str, ...]:
    """Returns the causes of the errors of a prediction, except wrong constants.

    Besides the causes of all predictions (`EVERY_RUN`), they are experts, choices that are not
    stated, formats under 16 bits (which scale values in several ways), and devices that no constant
    was fitted to.
    """
    found = list(EVERY_RUN)
    if model.experts:
        found.append("experts")
    if job.micro_batch is None or job.recompute is None:
        found.append("not stated")
    if job.precision in LOW_PRECISIONS:
        found.append("low precision")
    if cluster.kind.architecture not in FITTED_ARCHITECTURES:
        found.append(_OF_A_DEVICE)
    return tuple(found)


def similarity(
    model: Transformer,
    cluster: Cluster,
    layout: Layout,
    job: Workload,
    given: Workload | None = None,
) -> RunSimilarity:
    """Returns the properties of a run that determine its prediction's error.

    `given` is the workload before the planner made the open choices, by default `job`.

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
        error_causes(model, cluster, given or job),
    )
