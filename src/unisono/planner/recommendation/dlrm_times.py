"""The time of a training step of a recommendation model, by kind.

The order of the operators is that of `unisono.parallel`: bottom network, exchange of ids, look-up,
exchange of sums, interaction, top network. The backward pass has the reverse order. Then the ranks
sum the gradients of the dense part. So nothing hides an exchange. Ranks wait for each other in
each exchange, so the busiest rank determines the time of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log, sqrt

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.recommendation.dlrm_operators import Product, kernels, lookups, products
from unisono.planner.recommendation.dlrm_shape import Dlrm
from unisono.planner.recommendation.exchange_traffic import ID_BYTES, LENGTH_BYTES, SIZES_BYTES
from unisono.planner.recommendation.table_placement import TablePiece, TablePlacement
from unisono.planner.step_times.exchange_times import ExchangeTimes
from unisono.planner.step_times.kernel_times import KernelTimes

LAYER_OPERATORS = 9
"""Operators of a dense transformer layer in `step_times.layer_times`. The host's time to launch a
layer (the constant `launch_s`) divided by this number is the time to launch one operator."""


@dataclass(frozen=True, kw_only=True)
class DlrmPart:
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
        self.model, self.placement, self.kernels = model, placement, kernel_times
        self._exchanges, self._constants, self._update = exchanges, constants, update
        self._group = exchanges.place(placement.ranks, 1)
        self._held = [placement.pieces(rank) for rank in range(placement.ranks)]

    @property
    def value_bytes(self) -> float:
        """Bytes of an element of an activation, which exchanges send."""
        return self.kernels.wide_bytes

    def step(self, samples: int, microbatches: int, zero: int) -> dict[str, float]:
        """Returns the seconds of a step by kind; their sum is the step time.

        `samples`: samples of a microbatch on one rank.
        """
        kinds = dict.fromkeys(("lookup", "exchange", "matmul", "interaction", "memory"), 0.0)
        parts = list(self.parts(samples))
        for part in parts:
            kinds[part.kind] += microbatches * part.seconds
        launched = 2 * self._launches() * self._constants.launch_s / LAYER_OPERATORS
        device_s = sum(part.seconds for part in parts)
        kinds["host"] = microbatches * (max(launched, device_s) - device_s)
        kinds["gradients"] = self._exchanges.all_reduce_s(self.gradient_bytes, self._group)
        kinds["optimizer"] = self._optimizer_s(zero)
        # The step constant of newer software was fitted to transformers of billions of parameters.
        kinds["step"] = self._constants.dlrm_step_s
        spread = self._constants.straggler * sqrt(2 * log(self.placement.ranks))
        kinds["straggler"] = spread * sum(kinds.values())
        return kinds

    def parts(self, samples: int) -> Iterator[DlrmPart]:
        """Yields the parts of a microbatch. `samples`: samples of the microbatch on one rank."""
        yield from map(self._product, products(self.model, samples))
        for each in kernels(self.model, samples):
            nbytes = [v * self.value_bytes for v in (each.forward_values, each.backward_values)]
            forward_s, backward_s = (self._kernel_s(b * self._constants.traffic) for b in nbytes)
            text = f"{nbytes[0]:.3g} bytes forward, {nbytes[1]:.3g} backward"
            yield DlrmPart(
                name=each.name,
                kind=each.kind,
                forward_s=forward_s,
                backward_s=backward_s,
                formula=text,
            )
        yield self._lookup(samples)
        if self.placement.is_divided and self.placement.ranks > 1:
            yield from self._exchange_parts(samples)

    def _product(self, each: Product) -> DlrmPart:
        sizes = (each.rows, each.columns, each.inner)
        forward_s = self.kernels.product_s(*sizes, each.copies)
        weight_s = self.kernels.product_s(each.inner, each.columns, each.rows, each.copies)
        backward_s = weight_s
        if each.gradients == 2:
            backward_s += self.kernels.product_s(each.rows, each.inner, each.columns, each.copies)
        return DlrmPart(
            name=each.name,
            kind=each.kind,
            forward_s=forward_s,
            backward_s=backward_s,
            formula=f"{each.flops:.3g} FLOPs forward, {each.backward_flops:.3g} backward",
        )

    def _kernel_s(self, nbytes: float) -> float:
        return nbytes / self.kernels.memory_Bps + self._constants.kernel_start_s

    def _lookup(self, samples: int) -> DlrmPart:
        """Returns the look-ups, each pass on the rank that moves the most bytes in this pass."""
        forward = backward = 0.0
        for rank in range(self.placement.ranks):
            own = list(
                lookups(
                    self.model,
                    self.placement,
                    rank,
                    samples=samples,
                    value_bytes=self.value_bytes,
                    update=self._update,
                )
            )
            forward = max(forward, sum(each.forward_bytes for each in own))
            backward = max(backward, sum(each.backward_bytes for each in own))
        start_s = (self._kernels_of_lookup() - 1) * self._constants.kernel_start_s
        return DlrmPart(
            name="look-ups in tables",
            kind="lookup",
            forward_s=self._kernel_s(forward) + start_s,
            backward_s=self._kernel_s(backward) + start_s,
            formula=f"{forward:.3g} bytes forward, {backward:.3g} backward on the busiest rank, "
            f"at {self.kernels.memory_Bps:.4g} bytes/s",
        )

    def _kernels_of_lookup(self) -> int:
        """Returns the number of kernels of a pass: one for all tables, or with "dense" one for
        each."""
        if self._update == "rows":
            return 1
        replicas = sum(table.kind == "replicated" for table in self.placement.tables)
        return replicas + max(len(pieces) for pieces in self._held)

    def _exchange_parts(self, samples: int) -> Iterator[DlrmPart]:
        """Yields the exchanges of ids, of sums of whole bags, and of partial sums of rows."""
        group, exchanges = self._group, self._exchanges
        lengths = self._busiest(samples * LENGTH_BYTES, lambda piece: 1)
        ids = self._busiest(samples * ID_BYTES, self._ids)
        sizes_s = exchanges.all_to_all_s(SIZES_BYTES * (group.ranks - 1), group)
        ids_s = exchanges.all_to_all_s(lengths, group) + exchanges.all_to_all_s(ids, group)
        yield DlrmPart(
            name="exchange of ids",
            kind="exchange",
            forward_s=sizes_s + ids_s,
            backward_s=0.0,
            formula=f"3 all_to_all among {group.ranks}; {lengths + ids:.3g} bytes on the busiest "
            "rank",
        )
        sums = self._busiest(samples * self.value_bytes, lambda p: 0 if p.is_summed else p.sizes[1])
        if sums:
            sums_s = exchanges.all_to_all_s(sums, group)
            yield DlrmPart(
                name="exchange of sums",
                kind="exchange",
                forward_s=sums_s,
                backward_s=sums_s,
                formula=f"all_to_all among {group.ranks}, {sums:.3g} bytes on the busiest rank; "
                "gradients back",
            )
        columns = sum(piece.sizes[1] for piece in self._held[0] if piece.is_summed)
        if columns:
            whole = samples * group.ranks * columns * self.value_bytes
            one_s = exchanges.gather_s(whole, group)
            yield DlrmPart(
                name="sum of partial sums",
                kind="exchange",
                forward_s=one_s,
                backward_s=one_s,
                formula=f"reduce_scatter and all_gather of {whole:.3g} bytes among {group.ranks}",
            )

    def _ids(self, piece: TablePiece) -> float:
        """Returns the mean number of ids of a sample that belong to a piece."""
        ids = self.model.tables[piece.table].ids
        return ids / self.placement.ranks if piece.is_summed else ids

    def _busiest(self, of_sample: float, size: Callable[[TablePiece], float]) -> float:
        """Returns the most bytes that a rank sends or receives in an all_to_all.

        A rank exchanges its own samples with the pieces of the other ranks, and the samples of the
        other ranks with its own pieces. One of the two is sent and the other is received.
        """
        held = [sum(size(piece) for piece in pieces) for pieces in self._held]
        whole, others = sum(held), len(held) - 1
        return of_sample * max(max(others * own, whole - own) for own in held)

    @property
    def dense_parameters(self) -> int:
        """Parameters whose gradients all ranks sum: the dense part and replicated tables."""
        return self.model.dense_parameters + self.placement.replicated_rows * self.model.width

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients that all ranks sum."""
        return self.dense_parameters * self.value_bytes

    def _optimizer_s(self, zero: int) -> float:
        parameters = self.dense_parameters / (self.placement.ranks if zero else 1)
        if self._update == "dense":
            parameters += max(
                sum(piece.sizes[0] * piece.sizes[1] for piece in pieces) for pieces in self._held
            )
        return parameters * self._constants.optimizer_bytes / self.kernels.memory_Bps

    def _launches(self) -> int:
        """Returns the number of operators that the host launches in a forward pass."""
        model = self.model
        count = sum(1 for _ in products(model, 1)) + sum(1 for _ in kernels(model, 1))
        return count + self._kernels_of_lookup()
