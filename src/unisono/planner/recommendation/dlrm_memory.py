"""Bytes on each device of a recommendation model, and the choice of what fits into the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import Workload
from unisono.planner.memory.zero_states import state_bytes
from unisono.planner.recommendation.dlrm import Dlrm
from unisono.planner.recommendation.dlrm_operators import TABLE_BYTES, activation_values
from unisono.planner.recommendation.exchange_traffic import ID_BYTES
from unisono.planner.recommendation.greedy_placement import place_tables
from unisono.planner.recommendation.table_placement import TablePlacement

_TABLE_KINDS = ("tables", "table gradients", "table optimizer")
_BAG_BYTES = 16
"""Bytes that the backward pass keeps for a bag: the position of its first id, and its length."""
_STATES = {"rows": 0, "dense": 8}
"""Bytes of optimizer states for each element of a table: none, or two moments of Adam."""


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
class DlrmMemory:
    """The memory of the devices of one model and layout."""

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

    def fitting(self) -> DlrmFit:
        """Returns the largest micro batch that fits, with the placement that sends the fewest
        bytes.

        Fewer microbatches are never slower. The placement that sends the fewest bytes may put too
        many bytes on one device. Then a second placement limits the bytes of each device. If
        nothing fits, returns the first choice.
        """
        own, first = self.job.global_batch // self.layout.dp, None
        parts = [n for n in range(1, own + 1) if own % n == 0]
        given = self.job.micro_batch
        for samples in (own // n for n in parts) if given is None else (given,):
            for fit in self._placements(samples):
                first = first or fit
                if fit.fullest_bytes <= self.capacity_bytes:
                    return fit
        assert first is not None
        return first

    def _placements(self, samples: int) -> Iterator[DlrmFit]:
        fit = self._fit(samples, self._placed(None))
        yield fit
        rest = [sizes for kind, sizes in fit.memory.items() if kind not in _TABLE_KINDS]
        others = max(map(sum, zip(*rest, strict=True)))
        tables = sum(sum(fit.memory[kind]) for kind in _TABLE_KINDS)
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
        devices = [self._device(placement, rank, samples) for rank in range(placement.ranks)]
        memory = {kind: tuple(each[kind] for each in devices) for kind in devices[0]}
        return DlrmFit(placement=placement, samples=samples, memory=memory)

    def _device(self, placement: TablePlacement, rank: int, samples: int) -> dict[str, float]:
        """Returns the bytes of a device by kind."""
        model, update = self.model, self.update
        dense = model.dense_parameters + placement.replicated_rows * model.width
        states = state_bytes(
            dense,
            zero=self.layout.zero,
            shards=placement.ranks,
            precision=self.job.precision,
            gradient_bytes=4,
        )
        found = dict(zip(states._fields, states, strict=True))
        sizes = [piece.sizes for piece in placement.pieces(rank)]
        elements = sum(rows * columns for rows, columns in sizes)
        found["tables"] = elements * TABLE_BYTES
        found["table gradients"] = elements * TABLE_BYTES if update == "dense" else 0.0
        found["table optimizer"] = elements * _STATES[update]
        if update == "rows":
            found["table optimizer"] += sum(rows for rows, _ in sizes) * TABLE_BYTES
        kept = activation_values(model) * samples * self.value_bytes
        found["activations"] = kept + self._bag_bytes(placement, rank, samples)
        sums = placement.ranks * sum(columns for _, columns in sizes) if placement.ranks > 1 else 0
        buffer = samples * (sums + len(model.tables) * model.width)
        found["exchange buffers"] = buffer * self.value_bytes
        # Tables and their states are allocated once.
        live = sum(found.values()) - found["tables"] - found["table optimizer"]
        found["fragmentation"] = live * (self.fragmentation - 1)
        return found

    def _bag_bytes(self, placement: TablePlacement, rank: int, samples: float) -> float:
        """Returns the bytes of the ids that a rank keeps for the backward pass.

        For each id, backward also keeps the number of its bag.
        """
        found = 0.0
        for piece in placement.pieces(rank):
            ids = self.model.tables[piece.table].ids / (placement.ranks if piece.is_summed else 1)
            found += samples * placement.ranks * (2 * ID_BYTES * ids + _BAG_BYTES)
        for table in placement.tables:
            if table.kind == "replicated":
                found += samples * (2 * ID_BYTES * table.shape.ids + _BAG_BYTES)
        return found


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
