"""The times and the memory of layouts of one model on one cluster, with all open choices made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.constants.prediction_error import group_of, properties_of
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layer_division import stage_layers
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import MEGATRON_LM, RECOMPUTE, Workload
from unisono.planner.memory.stage_memory import MemoryModel
from unisono.planner.own_measurements.calibration import Calibration
from unisono.planner.own_measurements.own_factors import OwnFactors
from unisono.planner.step_times.step_time import StepModel

_LARGEST_MICRO_BATCH = 64
USABLE_MEMORY = 0.985
"""Share of the memory that a process may use. The driver uses the rest."""


def packed_model(model: Transformer, workload: Workload) -> Transformer:
    """Returns the model whose attention stays inside the documents that are packed into a sequence,
    as inside blocks. Raises ValueError for a model with windows of its own.
    """
    if workload.document in (None, workload.seq):
        return model
    if model.window:
        raise ValueError(
            "packed documents of a model with attention windows are not modelled; document = None "
            "is an upper limit of the time"
        )
    assert workload.document is not None
    return replace(model, window=workload.document, local_layers=model.layers, blocked_window=True)


class RunModel:
    """Computes times and memory of layouts of one model on one cluster. Caches partial results."""

    def __init__(
        self,
        model: Transformer,
        cluster: Cluster,
        workload: Workload,
        constants: CalibratedConstants,
        calibration: Calibration | None = None,
    ) -> None:
        model = packed_model(model, workload)
        if workload.lora is not None:
            workload.lora.check(model)
        self.calibrated = calibration is not None and bool(calibration.runs)
        own = calibration.own_runs(cluster.kind.name) if calibration else ()
        if calibration is not None:
            constants = calibration.with_links(cluster, constants)
        self.model, self.cluster, self.workload = model, cluster, workload
        self.constants = constants
        self.properties = properties_of(model, cluster, workload)
        """Properties that add to the errors of predictions."""
        self._own = {
            software: OwnFactors([run for run in own if run.software == software], constants.sigma)
            for software in dict.fromkeys(run.software for run in own)
        }
        self._factors = {name: each.factors(self.properties) for name, each in self._own.items()}
        self._blind = OwnFactors((), constants.sigma)
        self.times = StepModel(model, cluster, workload, constants)
        self.capacity_bytes = int(cluster.kind.memory_bytes * USABLE_MEMORY)
        self.memory = MemoryModel(
            model,
            workload,
            fragmentation=constants.fragmentation,
            communicator_bytes=constants.communicator_bytes,
            capacity_bytes=self.capacity_bytes,
        )
        self._chunk_counts: dict[tuple[int, str, int, bool], list[int]] = {}

    def step(self, layout: Layout, micro_batch: int, recompute: str) -> dict[str, float]:
        """Returns the seconds of a step by kind; their sum is the step time."""
        kinds = self.times.step(layout, micro_batch, recompute)
        factors = self._factors.get(self.software(layout)) if self._own else None
        if factors is None:
            return kinds
        return {kind: seconds * factors[group_of(kind)] for kind, seconds in kinds.items()}

    def software(self, layout: Layout) -> str:
        """Returns the name under which own runs with the software of a layout count."""
        # Megatron-LM of 2021 and 2022 differ only in the exchanges that they hide.
        found = self.workload.software_of(layout)
        return "megatron" if found in MEGATRON_LM else found

    def own_factors(self, layout: Layout) -> OwnFactors:
        """Returns what the user's runs say about a layout."""
        return self._own.get(self.software(layout), self._blind)

    @cached_property
    def least_factor(self) -> float:
        """Smallest factor that the user's own runs give for a kind of time of some layout."""
        return min([1.0, *(min(each.values()) for each in self._factors.values())])

    def fastest(self, layout: Layout) -> tuple[Layout, int, str, dict[str, float]]:
        """Returns the fastest choice that fits in memory, or if none fits, the choice that needs
        the least memory.

        A choice has the layout, micro batch, recomputation and times by kind.
        """
        choices = [
            (full, micro_batch, recompute)
            for full, micro_batch in self.open_choices(layout)
            for recompute in self.recomputations()
        ]
        if not choices:
            chunks, rounds = layout.rules.chunks or 1, layout.rules.least_rounds
            raise ValueError(
                f"the schedule {layout.schedule} needs {chunks} groups of layers on each of "
                f"{layout.pp} stages, and at least {rounds} x pp microbatches; the model has "
                f"{self.model.layers} layers; pp = {max(self.model.layers // chunks, 1)} or "
                "less, or the schedule 1f1b, works"
            )
        if len(choices) > 1:
            fitting = [each for each in choices if self.memory.fits(*each)]
            choices = fitting or [min(choices, key=lambda each: self.memory.fullest_bytes(*each))]
        return self._fastest_of(choices)

    def _fastest_of(
        self, choices: Sequence[tuple[Layout, int, str]]
    ) -> tuple[Layout, int, str, dict[str, float]]:
        """Returns the fastest of some choices, whose recomputations follow each other."""
        best: tuple[Layout, int, str, dict[str, float]] | None = None
        best_s, known = 0.0, None
        for each in choices:
            if each[:2] == known and not self._own:
                continue  # the remaining recomputation modes are slower
            kinds, known = self.step(*each), each[:2]
            step_s = sum(kinds.values())
            if best is None or step_s < best_s:
                best, best_s = (*each, kinds), step_s
        assert best is not None
        return best

    def recomputations(self) -> tuple[str, ...]:
        """Returns the recomputation modes to try, fastest first."""
        given = self.workload.recompute
        return RECOMPUTE if given is None else (given,)

    def open_choices(self, layout: Layout) -> Iterator[tuple[Layout, int]]:
        """Yields each complete layout (one with a chosen interleaving) and micro batch to try."""
        per_replica = max(self.workload.global_batch // layout.dp, 1)
        for micro_batch in self.micro_batches(per_replica):
            microbatches = max(per_replica // micro_batch, 1)
            for chunks in self.chunk_counts(layout, microbatches):
                full = layout if layout.vpp is not None else replace(layout, vpp=chunks)
                yield full, micro_batch

    def micro_batches(self, per_replica: int) -> list[int]:
        """Returns the micro batches to try: divisors of a replica's batch.

        If the workload states a micro batch, only this one is possible.
        """
        given = self.workload.micro_batch
        if given is not None:
            return [given] if per_replica % given == 0 else []
        largest = min(per_replica, _LARGEST_MICRO_BATCH)
        return [size for size in range(1, largest + 1) if per_replica % size == 0]

    def chunk_counts(self, layout: Layout, microbatches: int) -> list[int]:
        """Returns the numbers of groups of layers on each stage (`vpp`) to try."""
        if layout.vpp is not None:
            return [layout.vpp]
        key = layout.pp, layout.schedule, microbatches % layout.pp, microbatches < 2 * layout.pp
        found = self._chunk_counts.get(key)
        if found is None:
            found = self._chunk_counts[key] = self._open_chunk_counts(layout, microbatches)
        return found

    def _open_chunk_counts(self, layout: Layout, microbatches: int) -> list[int]:
        layers, pp, fixed = self.model.layers, layout.pp, layout.rules.chunks
        if fixed is not None and fixed > 1:
            enough = layers >= fixed * pp or layers + 2 == fixed * pp
            enough = enough and microbatches >= layout.rules.least_rounds * pp
            return [fixed] if enough and pp > 1 else []
        if pp == 1 or fixed == 1 or microbatches % pp:
            return [1]
        return [
            chunks
            for chunks in range(1, (layers + 2) // pp + 1)
            if chunks == 1 or layers % (pp * chunks) == 0 or (layers + 2) % (pp * chunks) == 0
            if stage_layers(layers, pp, chunks)
        ]
