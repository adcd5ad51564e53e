"""A module that keeps the experts of this rank, and computes those rows of all ranks that chose
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unisono.parallel.divisible.exchanges import gather_copies, keep_part
from unisono.parallel.divisible.interfaces import MicrobatchPart, attach
from unisono.parallel.divisible.parameter_block import cut, sum_over_tp
from unisono.parallel.expert_stacks.call_forms import CallForm, Choices
from unisono.parallel.expert_stacks.expert_stack import ExpertStack
from unisono.parallel.layers import ExpertExchange, expert_overhead_bytes
from unisono.parallel.training_mesh import TrainingMesh
from unisono.torch_backend import is_in_backward

_SENT = "unisono_bytes_sent"


class DividedExperts:
    """A module with stacked experts, of which this rank keeps an equal part.

    The module keeps its class, its names and its attributes; its `forward` is replaced. Each rank
    computes the rows of all ranks of `ep` that choose its experts. The ranks of `tp` call the
    module with equal rows, of which each one sends a part.
    """

    def __init__(self, stack: ExpertStack, mesh: TrainingMesh) -> None:
        self._stack, self._mesh = stack, mesh
        self.module = module = stack.module
        for name in stack.parameters:
            cut(module, name, mesh, dim=0, axis="ep")
        for name, parameter in module.named_parameters():
            if name not in stack.parameters:  # its gradient is that of the rows on this rank
                sum_over_tp(parameter)
        module.forward = self._forward
        attach(module, self)
        self.restart()

    def restart(self) -> None:
        """Begins a step, whose bytes are counted."""
        vars(self.module)[_SENT] = {}  # an attribute of the module, so an evaluation restores it

    def bytes_sent(self, parts: Sequence[MicrobatchPart] = ()) -> Mapping[str, float]:
        """Returns the bytes that this rank sends in the passes since `restart`, by group, from
        closed forms of the numbers of rows; see `Exchanging`."""
        found: Mapping[str, float] = vars(self.module)[_SENT]
        return found

    def _forward(self, *given: Any, **options: Any) -> torch.Tensor:
        form, call = self._stack.read(given, options)
        group = self._mesh.group("tp")
        own = replace(
            call,
            rows=keep_part(call.rows, group, dim=0),
            numbers=keep_part(call.numbers, group, dim=0),
            weights=None if call.weights is None else keep_part(call.weights, group, dim=0),
        )
        found = self._results(form, own)
        if group is not None:
            self._note_parts(call, found)
        whole = gather_copies(found, group, dim=0, length=len(call.rows))
        return whole.view(*call.shape, whole.shape[-1])

    def _results(self, form: CallForm, own: Choices) -> torch.Tensor:
        """Returns the results for rows of this rank."""
        numbers = own.numbers.flatten().long()
        self._require_known(numbers)
        order = numbers.argsort(stable=True)
        counts = torch.bincount(numbers, minlength=self._stack.experts)
        exchange = ExpertExchange(counts, self._mesh.group("ep"))
        sources = order // own.numbers.shape[1]
        rows = own.rows[sources]
        computed = self._computed(form, exchange.dispatch(rows), exchange.counts, own)
        self._note_rows(exchange, rows, computed)
        results = exchange.combine(computed)
        weighted = results
        if own.weights is not None:
            weighted = results * own.weights.flatten()[order].unsqueeze(-1)
        whole = weighted.new_zeros(len(own.rows), weighted.shape[-1])
        return whole.index_add(0, sources, weighted).to(results.dtype)

    def _computed(
        self, form: CallForm, rows: torch.Tensor, counts: list[int], like: Choices
    ) -> torch.Tensor:
        """Returns the results of rows that are sorted by the experts of this rank."""
        is_empty, experts = not len(rows), len(counts)
        if is_empty:  # the graph needs the exchanges and the parameters of all ranks
            one = torch.linspace(-1, 1, rows.shape[-1], dtype=rows.dtype)
            rows, counts = torch.cat([rows, one.expand(experts, -1)]), [1] * experts
        found = form.compute(
            lambda *values: self._stack.forward(self.module, *values, experts=experts),
            rows,
            counts,
            like,
        )
        return found[:0] if is_empty else found

    def _require_known(self, numbers: torch.Tensor) -> None:
        wrong = numbers[(numbers < 0) | (numbers >= self._stack.experts)]
        if len(wrong):
            raise ValueError(
                f"{self._stack.name}: expected numbers of experts from 0 to "
                f"{self._stack.experts - 1}, got {int(wrong[0])}; ep = 1 works if the module "
                "leaves such choices out"
            )

    def _note_rows(
        self, exchange: ExpertExchange, rows: torch.Tensor, results: torch.Tensor
    ) -> None:
        """Counts the bytes on `ep`: numbers of rows, headers, rows, results, gradients."""
        if (group := self._mesh.group("ep")) is None:
            return
        there, back = _row_bytes(rows), _row_bytes(results)
        moves = 2 + _has_gradient(rows) + _has_gradient(results)
        there_rows, back_rows = exchange.rows_dispatched, exchange.rows_combined
        sent = expert_overhead_bytes(group, experts=self._stack.experts, moves=moves)
        sent += there_rows * there + back_rows * back
        sent += back_rows * there * _has_gradient(rows)
        sent += there_rows * back * _has_gradient(results)
        self._note("ep", sent)

    def _note_parts(self, call: Choices, found: torch.Tensor) -> None:
        """Counts the bytes on `tp`: results, and gradients of rows and weights."""
        ranks = self._mesh.layout.tp
        given = [each for each in (call.rows, call.weights) if each is not None]
        parts = [found, *(each for each in given if _has_gradient(each))]
        longest = -(-len(call.rows) // ranks)
        self._note("tp", (ranks - 1) * longest * sum(map(_row_bytes, parts)))

    def _note(self, name: str, sent: float) -> None:
        before = self.bytes_sent()
        vars(self.module)[_SENT] = {**before, name: before.get(name, 0) + sent}


def _has_gradient(values: torch.Tensor) -> bool:
    """Returns True if a backward pass follows; a pass that runs again has no other one."""
    return values.requires_grad and not is_in_backward()


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[-1] * rows.element_size()
