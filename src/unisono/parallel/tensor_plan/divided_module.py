"""A module that computes this rank's part, with its exchanges before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.divisible.exchanges import (
    TensorSize,
    copy_to_all,
    gather_copies,
    keep_part,
    size_on_rank,
    sum_of_all,
)
from unisono.parallel.divisible.interfaces import MicrobatchPart, attach
from unisono.parallel.divisible.parameter_block import block_of, keep_spans, sum_over_tp
from unisono.parallel.tensor_plan.linear_sizes import (
    bias_of,
    inputs_of,
    is_transposed,
    outputs_of,
    weight_of,
)
from unisono.parallel.tensor_plan.module_cuts import PlannedModule
from unisono.parallel.training_mesh import TrainingMesh


class SharedInput:
    """The input of several modules that divide their outputs, such as queries, keys and values.

    They share one exchange, which sums the gradients of the input over the ranks.
    """

    def __init__(self, uses: int) -> None:
        """`uses`: the number of modules that may share an input."""
        self._uses, self._left = uses, 0
        self._given: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None

    def enter(self, x: torch.Tensor, mesh: TrainingMesh) -> tuple[torch.Tensor, bool]:
        """Returns an input whose gradients are summed, and whether this call added the exchange."""
        if self._left and x is self._given and self._entered is not None:
            found, is_new = self._entered, False
            self._left -= 1
        else:
            found, is_new = copy_to_all(x, mesh.group("tp")), True
            self._given, self._entered, self._left = x, found, self._uses - 1
        if not self._left:
            self._given = self._entered = None  # the activation is kept no longer than needed
        return found, is_new


class DividedModule:
    """A linear layer or an embedding that keeps this rank's parts of its parameters.

    The module keeps its class and names; its `forward` is replaced.
    """

    def __init__(self, planned: PlannedModule, mesh: TrainingMesh, shared: SharedInput) -> None:
        self.sums: tuple[TensorSize, ...] = ()
        """The sums over the ranks in the last pass: of results, or of gradients."""
        self.gathers: tuple[TensorSize, ...] = ()
        """The parts of this rank that the last pass gathered."""
        self._module, self._style = planned.module, planned.style
        self._name, self._mesh, self._shared = planned.name, mesh, shared
        self._parts: tuple[TensorSize, ...] = ()
        self._length = (outputs_of if planned.style.cut == "outputs" else inputs_of)(planned.module)
        _cut(planned, mesh)
        forward = {
            "outputs": self._outputs,
            "inputs": self._inputs,
            "rows": self._rows,
            "vectors": self._vectors,
        }[planned.style.cut]
        if isinstance(planned.module, nn.Embedding):
            self._first, self._whole = _own_rows(planned.module)
        planned.module.forward = forward
        attach(planned.module, self)

    def _outputs(self, input: torch.Tensor) -> torch.Tensor:
        x, is_new = self._shared.enter(input, self._mesh)
        y = _linear(self._module, x, bias_of(self._module))
        whole = self._gathered(y, self._length) if self._style.is_gathered else y
        self._note([size_on_rank(input, input.requires_grad)] if is_new else [])
        return whole

    def _inputs(self, input: torch.Tensor) -> torch.Tensor:
        group, x = self._mesh.group("tp"), input
        expected = self._length if self._style.is_split else inputs_of(self._module)
        if x.shape[-1] != expected:
            raise ValueError(
                f"{self._name}: style {self._style.name!r} expects {expected} inputs on this rank, "
                f"got {x.shape[-1]}; expected 'rowwise' after modules that divide their outputs, "
                "and 'rowwise_split_input' after others"
            )
        self._parts = ()
        if self._style.is_split:
            x = keep_part(x, group, dim=-1)
            if input.requires_grad:
                self._note_part(input, self._length)
        part = _linear(self._module, x, None)
        self._note([size_on_rank(part)])
        y = sum_of_all(part, group)
        bias = bias_of(self._module)
        return y if bias is None else y + bias

    def _rows(self, input: torch.Tensor) -> torch.Tensor:
        rows = weight_of(self._module).shape[0]
        is_here = (input >= self._first) & (input < self._first + rows)
        is_elsewhere = (input >= 0) & (input < self._whole) & ~is_here
        # torch refuses other numbers, which no rank has
        own = (input - self._first).masked_fill(is_elsewhere, 0)
        found: torch.Tensor = type(self._module).forward(self._module, own)
        part = found * is_here.unsqueeze(-1)
        self._note([size_on_rank(part)])
        return sum_of_all(part, self._mesh.group("tp"))

    def _vectors(self, input: torch.Tensor) -> torch.Tensor:
        y = type(self._module).forward(self._module, input)
        whole = self._gathered(y, self._length)
        self._note([])
        return whole

    def _gathered(self, y: torch.Tensor, length: int) -> torch.Tensor:
        whole = gather_copies(y, self._mesh.group("tp"), dim=-1, length=length)
        self._note_part(whole, length)
        return whole

    def _note_part(self, whole: torch.Tensor, length: int) -> None:
        """Notes the padded part of this rank of an array that the ranks gather."""
        longest, size = -(-length // self._mesh.layout.tp), size_on_rank(whole)
        self._parts = (size._replace(elements=size.elements // length * longest),)

    def _note(self, sums: Sequence[TensorSize]) -> None:
        """Notes what a training pass exchanges; an evaluation changes nothing."""
        if torch.is_grad_enabled():
            self.sums, self.gathers = tuple(sums), self._parts

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank sends on `tp` in a step; see `Exchanging`."""
        others = self._mesh.layout.tp - 1
        sent = sum(self._mesh.sum_elements(count, "tp") * size for count, size in self.sums)
        sent += sum(others * count * size for count, size in self.gathers)
        return {"tp": len(parts) * sent}


def divide_module(planned: PlannedModule, mesh: TrainingMesh, shared: SharedInput) -> None:
    """Keeps this rank's part of a module."""
    if planned.style.sums_gradients:
        for parameter in planned.module.parameters():
            sum_over_tp(parameter)
    elif planned.cuts:
        DividedModule(planned, mesh, shared)
    for name, value in planned.local_values.items():
        setattr(planned.module, name, value)


def _cut(planned: PlannedModule, mesh: TrainingMesh) -> None:
    rank = mesh.coordinates["tp"]
    for name, cut in planned.cuts.items():
        group = "tokens" if cut.copies == 1 else "column_tokens"
        keep_spans(planned.module, name, dim=cut.dim, spans=cut.ranges[rank], copies=group)


def _own_rows(module: nn.Embedding) -> tuple[int, int]:
    """Returns the first row of an embedding table on this rank, and the number of rows of the
    whole table. Makes the padding a row of this rank, or none."""
    weight = weight_of(module)
    block = block_of(weight)
    first, rows = block.start[0], weight.shape[0]
    if module.padding_idx is not None:
        own = module.padding_idx - first
        module.padding_idx = own if 0 <= own < rows else None
    return first, block.shape[0]


def _linear(module: nn.Module, x: torch.Tensor, bias: nn.Parameter | None) -> torch.Tensor:
    weight = weight_of(module)
    if not is_transposed(module):
        return functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], y.shape[-1])
