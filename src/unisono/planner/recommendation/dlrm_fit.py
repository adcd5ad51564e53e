"""The micro batch and the placement of tables that fit into the devices' memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import Workload
from unisono.planner.recommendation.dlrm_memory import TABLE_KINDS_OF_MEMORY, device_memory
from unisono.planner.recommendation.dlrm_shape import Dlrm
from unisono.planner.recommendation.greedy_placement import place_tables
from unisono.planner.recommendation.table_placement import TablePlacement


@dataclass(frozen=True, kw_only=True)
class DlrmFit:
    """A placement of tables, the samples of a microbatch on one device, and the memory by kind."""

    placement: TablePlacement
    samples: int
    memory: Mapping[str, tuple[float, ...]]

    @property
    def fullest_bytes(self) -> float:
        """Bytes of the fullest device."""
        return max(map(sum, zip(*self.memory.values(), strict=True)))


@dataclass(frozen=True, kw_only=True)
class DlrmFitter:
    """Chooses the micro batch and the placement that fit into memory, for one model and layout."""

    model: Dlrm
    layout: Layout
    job: Workload
    kind: str
    """Kind of placement, for `place_tables`."""
    update: str
    """One of `TABLE_UPDATES`."""
    value_bytes: float
    """Bytes of an activation's element."""
    fragmentation: float
    """Ratio of the memory that the allocator reserves to the live tensors."""
    capacity_bytes: float

    def choose(self) -> DlrmFit:
        """Returns the largest micro batch that fits, with the placement that sends the fewest
        bytes.

        Fewer microbatches are never slower. The placement that sends the fewest bytes may put too
        many bytes on one device. Then a second placement limits the bytes of each device. If
        nothing fits, returns the first choice.
        """
        first = None
        for samples in self._micro_batches():
            for fit in self._placements(samples):
                first = first or fit
                if fit.fullest_bytes <= self.capacity_bytes:
                    return fit
        assert first is not None
        return first

    def _micro_batches(self) -> list[int]:
        own = self.job.global_batch // self.layout.dp
        if self.job.micro_batch is not None:
            return [self.job.micro_batch]
        return [own // parts for parts in range(1, own + 1) if own % parts == 0]

    def _placements(self, samples: int) -> Iterator[DlrmFit]:
        fit = self._fit(samples, self._placed(None))
        yield fit
        others = max(
            sum(sizes)
            for sizes in zip(
                *(each for kind, each in fit.memory.items() if kind not in TABLE_KINDS_OF_MEMORY),
                strict=True,
            )
        )
        tables = sum(sum(fit.memory[kind]) for kind in TABLE_KINDS_OF_MEMORY)
        elements = sum(fit.placement.memory_bytes(item_bytes=1))
        if not tables or self.capacity_bytes <= others:
            return
        room = (self.capacity_bytes - others) * elements / tables
        try:
            limited = self._placed(int(room) * int(self.value_bytes))
        except ValueError:  # no placement has so few bytes on each device
            return
        yield self._fit(samples, limited)

    def _placed(self, capacity_bytes: int | None) -> TablePlacement:
        ranks, samples = self.layout.dp, self.job.global_batch
        return _placed(self.model, ranks, samples, self.kind, int(self.value_bytes), capacity_bytes)

    def _fit(self, samples: int, placement: TablePlacement) -> DlrmFit:
        devices = list(
            device_memory(
                self.model,
                placement,
                samples=samples,
                value_bytes=self.value_bytes,
                precision=self.job.precision,
                zero=self.layout.zero,
                update=self.update,
                fragmentation=self.fragmentation,
            )
        )
        memory = {kind: tuple(each[kind] for each in devices) for kind in devices[0]}
        return DlrmFit(placement=placement, samples=samples, memory=memory)


@lru_cache(maxsize=64)
def _placed(
    model: Dlrm, ranks: int, samples: int, kind: str, value_bytes: int, capacity_bytes: int | None
) -> TablePlacement:
    return place_tables(
        model.tables,
        width=model.width,
        ranks=ranks,
        samples=samples,
        kind=kind,
        item_bytes=value_bytes,
        capacity_bytes=capacity_bytes,
    )
