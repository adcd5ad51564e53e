"""A prediction: the step time and the memory of one layout, each in total and by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import erf, exp, hypot, log, sqrt

from unisono.planner.constants.calibrated_constants import CalibratedConstants, default_constants
from unisono.planner.constants.prediction_error import NORMAL_80, ErrorCauses
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.layout_check import check_layout
from unisono.planner.inputs.training_flops import step_flops
from unisono.planner.inputs.transformer import APPROXIMATION_DEVIATION, Transformer
from unisono.planner.inputs.workload import Workload
from unisono.planner.layout_evaluation import RunModel
from unisono.planner.memory.stage_memory import MEMORY_KINDS, MemoryUse
from unisono.planner.own_measurements.calibration import Calibration, OwnRun
from unisono.planner.stated_inputs import (
    require_workload,
    stated_cluster,
    stated_layout,
    stated_model,
)
from unisono.planner.step_times.time_tree import TimeNode, time_tree

_TIGHT = 0.05
"""Share of the capacity under which the headroom of a layout is tight."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted step time and memory of a layout."""

    layout: Layout
    """The layout, in which the planner has made all open choices."""
    job: Workload
    """The workload, in which the planner has made all open choices."""
    step_s: float
    """Seconds of one optimizer step."""
    time: Mapping[str, float]
    """Seconds by kind; their sum is `step_s`."""
    memory_bytes: int
    """Bytes that a process reserves on the fullest device, as `nvidia-smi` shows them: live
    tensors, the allocator's overhead, the context and communicators. The allocator gives unused
    memory back before it fails, so this is at most the capacity if the layout fits."""
    capacity_bytes: int
    """Bytes that a process may use on a device."""
    mfu: float
    """Model FLOPs utilisation: FLOPs without recomputation over the peak of all devices. For fp8
    and fp4, the peak is that of bf16."""
    tokens_per_s: float
    """Tokens per second of all devices."""
    _run: RunModel = field(repr=False, compare=False)

    @property
    def model(self) -> Transformer:
        """The model."""
        return self._run.model

    @property
    def cluster(self) -> Cluster:
        """The devices of the layout."""
        return self._run.cluster

    @property
    def own_runs(self) -> int:
        """Number of the user's own runs with this device and software (`calibration`)."""
        return len(self._run.own_factors(self.layout).runs)

    @cached_property
    def _blind_kinds(self) -> Mapping[str, float]:
        """Seconds by kind without the user's own runs."""
        return self._run.times.step(self.layout, self._micro_batch, self._recompute)

    @property
    def causes(self) -> ErrorCauses:
        """Causes of the error of this prediction."""
        return ErrorCauses.of(self._blind_kinds, self._run.properties)

    @cached_property
    def deviation(self) -> float:
        """Standard deviation of the logarithm of measured over predicted time."""
        known = self._run.own_factors(self.layout).deviation(self.causes)
        return hypot(known, self._rough_deviation)

    @property
    def _rough_deviation(self) -> float:
        """Part of the deviation that comes from the model's approximations."""
        return APPROXIMATION_DEVIATION * sqrt(len(self.model.approximations))

    @property
    def _half_width(self) -> float:
        """Half of the width of the 80 % interval of the logarithm of the step time."""
        return NORMAL_80 * self.deviation

    @property
    def low_s(self) -> float:
        """Lower end of the interval that holds 80 % of measured steps, in seconds."""
        return self.step_s / exp(self._half_width)

    @property
    def high_s(self) -> float:
        """Upper end of the interval that holds 80 % of measured steps, in seconds."""
        return self.step_s * exp(self._half_width)

    def ratio_deviation(self, other: Prediction) -> float:
        """Returns the standard deviation of the logarithm of the ratio of two steps' times, for
        layouts of one model on one cluster.

        With the same software, the runs share most of their errors. Runs with different software
        share only their parts of the model and the device, as runs of two sources do.
        """
        run, causes, others = self._run, self.causes, other.causes
        mine = run.own_factors(self.layout)
        found = mine.ratio_deviation(causes, others)
        if run.software(self.layout) == run.software(other.layout):
            return found
        theirs = run.own_factors(other.layout)
        separate = sqrt(2) * run.constants.sigma["source"]
        return hypot(max(found, theirs.ratio_deviation(causes, others)), separate)

    def chance_against(self, other: Prediction, *, with_cost: bool = False) -> float:
        """Returns the probability that this layout is faster than another one of the same model on
        the same cluster; with `with_cost`, that its step takes fewer device seconds.

        >>> from unisono import planner
        >>> job = planner.Workload(seq=2048, global_batch=64, micro_batch=1, recompute="none")
        >>> first, second = (
        ...     planner.predict("gpt3-7.5b", "a100:16", f"dp={16 // tp},tp={tp},zero=1", job)
        ...     for tp in (4, 8)
        ... )
        >>> 0 < second.chance_against(first) < first.chance_against(first) == 0.5
        True
        """
        ratio = self.step_s / other.step_s
        if with_cost:
            ratio *= self.layout.devices / other.layout.devices
        return 0.5 - 0.5 * erf(log(ratio) / self.ratio_deviation(other) / sqrt(2))

    def as_own_run(self, name: str, measured_s: float) -> OwnRun:
        """Returns the run with this layout that took `measured_s` seconds, for a `Calibration`.
        The prediction must not be calibrated with own runs.
        """
        causes = self.causes
        return OwnRun(
            name=name,
            device=self.cluster.kind.name,
            software=self._run.software(self.layout),
            exchange=causes.exchange,
            host=causes.host,
            properties=causes.properties,
            measured_s=measured_s,
            predicted_s=self.step_s,
        )

    @property
    def fits(self) -> bool:
        """True if the fullest device has enough memory."""
        return self.memory_bytes <= self.capacity_bytes

    @cached_property
    def _use(self) -> MemoryUse:
        return self._run.memory.use(self.layout, self._micro_batch, self._recompute)

    @property
    def live_bytes(self) -> int:
        """Largest sum of all live tensors on the fullest device (`max_memory_allocated`)."""
        return round(self._use.live)

    @property
    def headroom_bytes(self) -> int:
        """Bytes of the capacity that remain if the allocator has the least overhead. Negative if
        the layout does not fit."""
        return round(self.capacity_bytes - self._use.needed)

    @property
    def tight(self) -> bool:
        """True if the layout fits, but with less than 5 % of the capacity to spare: then longer
        samples, uneven experts or a fragmented allocator may exceed it.
        """
        return 0 <= self.headroom_bytes < _TIGHT * self.capacity_bytes

    @cached_property
    def memory(self) -> Mapping[str, tuple[float, ...]]:
        """Bytes of a device of each pipeline stage, by kind."""
        stages = self._run.memory.stages(self.layout, self._micro_batch, self._recompute)
        return {kind: tuple(stage[kind] for stage in stages) for kind in MEMORY_KINDS}

    @property
    def host_bytes(self) -> float:
        """Bytes of the fullest device's optimizer states in the memory of its host, with
        `Workload.offload`."""
        return self._run.memory.host_bytes(self.layout)

    def explain(self) -> TimeNode:
        """Returns the step time as a tree, whose leaves are formulas with numbers.

        `str` of the result draws the tree.
        """
        tree = time_tree(
            self._run.times, self.layout, self._micro_batch, self._recompute, self.time
        )
        return replace(tree, formula=self.interval_text())

    def interval_text(self) -> str:
        """Returns one line with the width of the interval and the effect of the user's runs."""
        text = f"80 % interval: within {exp(self._half_width) - 1:.0%}"
        if self.model.approximations:
            text += f" (wider, since {', '.join(self.model.approximations)})"
        if not self._run.calibrated:
            return text
        if not self.own_runs:
            return f"{text}; the calibration has no run with this device and software"
        blind = hypot(self.causes.deviation(self._run.constants.sigma), self._rough_deviation)
        before = exp(NORMAL_80 * blind) - 1
        runs = f"{self.own_runs} own run{'s' if self.own_runs > 1 else ''}"
        change = self.step_s / sum(self._blind_kinds.values())
        return f"{text} after {runs}, {before:.0%} without; step time x {change:.3f}"

    @property
    def _micro_batch(self) -> int:
        assert self.job.micro_batch is not None
        return self.job.micro_batch

    @property
    def _recompute(self) -> str:
        assert self.job.recompute is not None
        return self.job.recompute


def predict(
    model: Transformer | str,
    cluster: Cluster | str,
    layout: Layout | str,
    job: Workload,
    *,
    constants: CalibratedConstants | None = None,
    calibration: Calibration | None = None,
) -> Prediction:
    """Predicts the time and memory of a training step.

    For values that are None in `job` or `layout`, the prediction uses the fastest values that fit
    in memory, or the values with the least memory if none fit. Raises ValueError for a layout that
    cannot train the model. The message has the nearest valid value. `constants` replace the shipped
    constants. `calibration` holds the user's own measurements (`calibrate`). A model, cluster or
    layout may be a text of the command line, such as "llama3-8b", "h100:8" or "dp=2,tp=4".

    >>> from unisono import planner
    >>> found = planner.predict(
    ...     planner.load_model("gpt3-175b"),
    ...     planner.Cluster.parse("a100:1024"),
    ...     planner.Layout(dp=16, tp=8, pp=8, sequence_parallel=True, zero=1),
    ...     planner.Workload(seq=2048, global_batch=1536, micro_batch=1, recompute="full"),
    ... )
    >>> found.low_s < found.step_s < found.high_s and found.fits
    True
    """
    model, cluster = stated_model(model), stated_cluster(cluster)
    layout = stated_layout(layout)
    require_workload(job)
    check_layout(model, cluster, layout, job)
    run = _run_model(model, cluster, job, constants or default_constants(), calibration)
    return prediction_of(run, *run.fastest(layout))


@lru_cache(maxsize=32)
def _run_model(
    model: Transformer,
    cluster: Cluster,
    job: Workload,
    constants: CalibratedConstants,
    calibration: Calibration | None,
) -> RunModel:
    return RunModel(model, cluster, job, constants, calibration)


def prediction_of(
    run: RunModel, layout: Layout, micro_batch: int, recompute: str, kinds: dict[str, float]
) -> Prediction:
    """Returns the prediction of a layout whose times by kind are known."""
    job = run.workload
    if job.micro_batch != micro_batch or job.recompute != recompute:
        job = replace(job, micro_batch=micro_batch, recompute=recompute)
    step_s = sum(kinds.values())
    frozen = job.lora is not None
    flops = step_flops(run.model, seq=job.seq, batch=job.global_batch, frozen=frozen)
    flops *= 1 - job.padding
    return Prediction(
        layout=layout,
        job=job,
        step_s=step_s,
        time=kinds,
        memory_bytes=round(run.memory.fullest_bytes(layout, micro_batch, recompute)),
        capacity_bytes=run.capacity_bytes,
        mfu=flops / (step_s * run.times.kernels.wide_peak * run.cluster.devices),
        tokens_per_s=job.tokens / step_s,
        _run=run,
    )
