"""The time of a training step of a recommendation model, by kind.

The order of the operators is that of `unisono.parallel`: bottom network, exchange of ids, look-up,
exchange of sums, interaction, top network. The backward pass has the reverse order. Then the ranks
sum the gradients of the dense part. So nothing hides an exchange. Ranks wait for each other in
each exchange, so the busiest rank determines the time of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log, sqrt
from typing import NamedTuple

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.recommendation.dlrm import Dlrm
from unisono.planner.recommendation.dlrm_operators import (
    Product,
    kernels,
    lookup_bytes,
    products,
)
from unisono.planner.recommendation.exchange_traffic import ID_BYTES, LENGTH_BYTES, SIZES_BYTES
from unisono.planner.recommendation.table_placement import TablePiece, TablePlacement
from unisono.planner.step_times.exchange_times import ExchangeTimes
from unisono.planner.step_times.kernel_times import KernelTimes

_LAYER_OPERATORS = 9
"""Operators of a dense transformer layer in `step_times.layer_times`. The host's time to launch a
layer (the constant `launch_s`) divided by this number is the time to launch one operator."""


class DlrmPart(NamedTuple):
    """A part of the step on the busiest rank, for one microbatch, forward and backward."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    formula: str

    @property
    def seconds(self) -> float:
        """Seconds of both passes."""
        return self.forward_s + self.backward_s


class DlrmTimes:
    """Computes the times of steps of one model with one placement of its tables."""

    def __init__(
        self,
        model: Dlrm,
        placement: TablePlacement,
        kernel_times: KernelTimes,
        exchanges: ExchangeTimes,
        constants: CalibratedConstants,
        *,
        update: str,
    ) -> None:
        self._model, self._placement, self.kernels = model, placement, kernel_times
        self._exchanges, self._constants, self._update = exchanges, constants, update
        self._group = exchanges.place(placement.ranks, 1)
        self._held = [placement.pieces(rank) for rank in range(placement.ranks)]
        self._dense = model.dense_parameters + placement.replicated_rows * model.width
        self.gradient_bytes = self._dense * kernel_times.wide_bytes
        """Bytes of the gradients that all ranks sum: of the dense part and replicated tables."""

    def step(self, samples: int, microbatches: int, zero: int) -> dict[str, float]:
        """Returns the seconds of a step by kind; their sum is the step time.

        `samples`: samples of a microbatch on one rank.
        """
        constants, parts = self._constants, list(self.parts(samples))
        kinds = dict.fromkeys(("lookup", "exchange", "matmul", "interaction", "memory"), 0.0)
        for part in parts:
            kinds[part.kind] += microbatches * part.seconds
        operators = sum(part.kind != "exchange" for part in parts) - 1 + self._lookup_kernels()
        launched = 2 * operators * constants.launch_s / _LAYER_OPERATORS
        device_s = sum(part.seconds for part in parts)
        kinds["host"] = microbatches * (max(launched, device_s) - device_s)
        kinds["gradients"] = self._exchanges.all_reduce_s(self.gradient_bytes, self._group)
        updated = self._dense / (self._placement.ranks if zero else 1)
        if self._update == "dense":
            updated += max(sum(p.sizes[0] * p.sizes[1] for p in pieces) for pieces in self._held)
        kinds["optimizer"] = updated * constants.optimizer_bytes / self.kernels.memory_Bps
        # The step constant of newer software was fitted to transformers of billions of parameters.
        kinds["step"] = constants.dlrm_step_s
        spread = constants.straggler * sqrt(2 * log(self._placement.ranks))
        kinds["straggler"] = spread * sum(kinds.values())
        return kinds

    def parts(self, samples: int) -> Iterator[DlrmPart]:
        """Yields the parts of a microbatch. `samples`: samples of the microbatch on one rank."""
        yield from map(self._product, products(self._model, samples))
        for each in kernels(self._model, samples):
            values = (each.forward_values, each.backward_values)
            forward, backward = (count * self.kernels.wide_bytes for count in values)
            forward_s, backward_s = (
                self._kernel_s(nbytes * self._constants.traffic) for nbytes in (forward, backward)
            )
            text = f"{forward:.3g} bytes forward, {backward:.3g} backward"
            yield DlrmPart(each.name, each.kind, forward_s, backward_s, text)
        yield self._lookup(samples)
        if self._placement.is_divided and self._placement.ranks > 1:
            yield from self._exchange_parts(samples)

    def _product(self, each: Product) -> DlrmPart:
        rows, columns, inner, copies = each.rows, each.columns, each.inner, each.copies
        forward_s = self.kernels.product_s(rows, columns, inner, copies)
        backward_s = self.kernels.product_s(inner, columns, rows, copies)
        if each.gradients == 2:
            backward_s += self.kernels.product_s(rows, inner, columns, copies)
        text = f"{each.flops:.3g} FLOPs forward, {each.backward_flops:.3g} backward"
        return DlrmPart(each.name, each.kind, forward_s, backward_s, text)

    def _kernel_s(self, nbytes: float) -> float:
        return nbytes / self.kernels.memory_Bps + self._constants.kernel_start_s

    def _lookup(self, samples: int) -> DlrmPart:
        """Returns the look-ups, each pass on the rank that moves the most bytes in this pass."""
        moved = [
            lookup_bytes(
                self._model,
                self._placement,
                rank,
                samples=samples,
                value_bytes=self.kernels.wide_bytes,
                update=self._update,
            )
            for rank in range(self._placement.ranks)
        ]
        forward, backward = (max(each[number] for each in moved) for number in (0, 1))
        start_s = (self._lookup_kernels() - 1) * self._constants.kernel_start_s
        return DlrmPart(
            "look-ups in tables",
            "lookup",
            self._kernel_s(forward) + start_s,
            self._kernel_s(backward) + start_s,
            f"{forward:.3g} bytes forward, {backward:.3g} backward on the busiest rank, at "
            f"{self.kernels.memory_Bps:.4g} bytes/s",
        )

    def _lookup_kernels(self) -> int:
        """Returns the number of kernels of a pass: one for all tables, or with "dense" one for
        each."""
        if self._update == "rows":
            return 1
        replicas = sum(table.kind == "replicated" for table in self._placement.tables)
        return replicas + max(len(pieces) for pieces in self._held)

    def _exchange_parts(self, samples: int) -> Iterator[DlrmPart]:
        """Yields the exchanges of ids, of sums of whole bags, and of partial sums of rows."""
        group, exchanges = self._group, self._exchanges
        lengths = self._busiest(samples * LENGTH_BYTES, lambda piece: 1)
        ids = self._busiest(samples * ID_BYTES, self._ids)
        sizes_s = exchanges.all_to_all_s(SIZES_BYTES * (group.ranks - 1), group)
        ids_s = exchanges.all_to_all_s(lengths, group) + exchanges.all_to_all_s(ids, group)
        text = f"3 all_to_all among {group.ranks}; {lengths + ids:.3g} bytes on the busiest rank"
        yield DlrmPart("exchange of ids", "exchange", sizes_s + ids_s, 0.0, text)
        value_bytes = self.kernels.wide_bytes
        sums = self._busiest(samples * value_bytes, lambda p: 0 if p.is_summed else p.sizes[1])
        if sums:
            one_s = exchanges.all_to_all_s(sums, group)
            text = f"all_to_all among {group.ranks}, {sums:.3g} bytes on the busiest rank; "
            yield DlrmPart("exchange of sums", "exchange", one_s, one_s, text + "gradients back")
        columns = sum(piece.sizes[1] for piece in self._held[0] if piece.is_summed)
        if columns:
            whole = samples * group.ranks * columns * value_bytes
            one_s = exchanges.gather_s(whole, group)
            text = f"reduce_scatter and all_gather of {whole:.3g} bytes among {group.ranks}"
            yield DlrmPart("sum of partial sums", "exchange", one_s, one_s, text)

    def _ids(self, piece: TablePiece) -> float:
        """Returns the mean number of ids of a sample that belong to a piece."""
        ids = self._model.tables[piece.table].ids
        return ids / self._placement.ranks if piece.is_summed else ids

    def _busiest(self, of_sample: float, size: Callable[[TablePiece], float]) -> float:
        """Returns the most bytes that a rank sends or receives in an all_to_all.

        A rank exchanges its own samples with the pieces of the other ranks, and the samples of the
        other ranks with its own pieces. One of the two is sent and the other is received.
        """
        held = [sum(size(piece) for piece in pieces) for pieces in self._held]
        whole, others = sum(held), len(held) - 1
        return of_sample * max(max(others * own, whole - own) for own in held)
