"""A shard on its server: parameters, an optimizer for each range, and received gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from unisono.parallel.parameter_server.byte_ranges import ByteLayout, ByteRange
from unisono.parallel.parameter_server.range_state import RangeState

OptimizerFactory: TypeAlias = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Function that makes an optimizer for pieces of parameters. A piece has one dimension and its
parameter's name."""


class Gradient(NamedTuple):
    """A worker's gradient of one range, and what the worker's `Push` says about it."""

    data: torch.Tensor
    used: NDArray[np.uint8]
    learning_rate: float = nan


class _Piece(NamedTuple):
    parameter: nn.Parameter
    mark: int
    """Index of the parameter's tensor among the shard's tensors."""
    run: int
    first: int
    """Index of the parameter's first element in its run, the adjacent elements of one type."""


class ServedRange:
    """One range of a shard, with its values, its optimizer and the state of its pushes."""

    def __init__(
        self,
        number: int,
        within: ByteRange,
        values: torch.Tensor,
        layout: ByteLayout,
        marks: Mapping[int, int],
        optimizer: OptimizerFactory,
        state: RangeState[Gradient],
    ) -> None:
        """`values`: the bytes of the range, which the optimizer changes in place. `marks`: index of
        each tensor among the shard's tensors.
        """
        self.number = number
        self.within = within
        self.values = values
        self.state = state
        self._runs: list[tuple[torch.dtype, slice]] = []
        self._pieces: list[_Piece] = []
        named = []
        for piece in layout.pieces(within):
            spec = layout.tensors[piece.tensor]
            low = piece.start - within.start
            here = slice(low, low + piece.count * spec.item_bytes)
            dtype = getattr(torch, spec.dtype)
            if not self._runs or self._runs[-1][0] != dtype:
                self._runs.append((dtype, here))
            _, run = self._runs[-1]
            self._runs[-1] = (dtype, slice(run.start, here.stop))
            first = (low - run.start) // spec.item_bytes
            parameter = nn.Parameter(values[here].view(dtype))
            run_index = len(self._runs) - 1
            self._pieces.append(_Piece(parameter, marks[piece.tensor], run_index, first))
            named.append((spec.name, parameter))
        self.optimizer = optimizer(named)
        if any("initial_lr" in group for group in self.optimizer.param_groups):
            raise ValueError(
                "optimizer: expected one without a learning-rate scheduler, whose state a server "
                "cannot move: call set_learning_rate of the parameter server before each step"
            )

    def apply(self, gradients: Sequence[Gradient]) -> None:
        """Takes a step of the optimizer with the mean of the gradients.

        A tensor that no worker used keeps its values and its optimizer state.
        """
        self._set_learning_rate({g.learning_rate for g in gradients if not isnan(g.learning_rate)})
        with torch.no_grad():
            means = [
                mean_in_order([each.data[run].view(dtype) for each in gradients])
                for dtype, run in self._runs
            ]
        for piece in self._pieces:
            used = any(each.used[piece.mark] for each in gradients)
            end = piece.first + piece.parameter.numel()
            piece.parameter.grad = means[piece.run][piece.first : end] if used else None
        self.optimizer.step()

    def _set_learning_rate(self, found: set[float]) -> None:
        """Sets the learning rate that the workers set for a step, if any."""
        if len(found) > 1:
            raise ValueError(
                "set_learning_rate: expected the same learning rate on all workers in a step, "
                f"found {' and '.join(map(str, sorted(found)))}"
            )
        for rate in found:
            for group in self.optimizer.param_groups:
                if "lr" not in group:
                    raise ValueError(
                        f"set_learning_rate: {type(self.optimizer).__name__} has no learning rate"
                    )
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


class ServedShard:
    """All ranges of one shard."""

    def __init__(
        self,
        number: int,
        layout: ByteLayout,
        ranges: Mapping[int, ByteRange],
        values: torch.Tensor,
        optimizer: OptimizerFactory,
        new_state: Callable[[], RangeState[Gradient]],
    ) -> None:
        """`ranges`: the ranges of the shard, by number. `values`: the bytes of the shard."""
        self.number = number
        first = next(iter(ranges.values()))
        self.start = first.start
        self.values = values
        whole = ByteRange(start=self.start, stop=self.start + values.numel())
        self.tensors = layout.tensors_in(whole)
        """The tensors that have elements in this shard."""
        marks = {tensor: place for place, tensor in enumerate(self.tensors)}
        self.ranges = {
            number: ServedRange(
                number, within, values[self.slice_of(within)], layout, marks, optimizer, new_state()
            )
            for number, within in ranges.items()
        }
        self._incoming: dict[int, torch.Tensor] = {}

    def slice_of(self, within: ByteRange) -> slice:
        """Returns the slice of this shard's bytes where a range lies."""
        return slice(within.start - self.start, within.stop - self.start)

    def incoming(self, worker: int, within: ByteRange) -> torch.Tensor:
        """Returns the memory for a worker's gradient of a range, to receive it into."""
        if worker not in self._incoming:
            self._incoming[worker] = torch.empty_like(self.values)
        return self._incoming[worker][self.slice_of(within)]

    @property
    def steps(self) -> int:
        """Number of steps whose gradients of all workers every range has applied."""
        return min(each.state.least_applied for each in self.ranges.values())

    def save(self) -> dict[str, Any]:
        """Returns values, optimizer states and applied steps, for `load` and `torch.save`."""
        return {
            "start": self.start,
            "values": self.values,
            "steps": self.steps,
            "optimizers": [each.optimizer.state_dict() for each in self.ranges.values()],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores the state that `save` returned. Raises `ValueError` if the shard differs."""
        found = (saved["start"], saved["values"].numel(), len(saved["optimizers"]))
        expected = (self.start, self.values.numel(), len(self.ranges))
        if found != expected:
            raise ValueError(
                f"shard {self.number}: expected (first byte, bytes, ranges) {expected}, found "
                f"{found}: the model, the number of servers and range_bytes must not change"
            )
        with torch.no_grad():
            self.values.copy_(saved["values"])
        for each, state in zip(self.ranges.values(), saved["optimizers"], strict=True):
            each.optimizer.load_state_dict(state)


def mean_in_order(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns (((g0 + g1) + g2) + ...) / n, bitwise equal to the average of a reproducible
    communicator. May overwrite the first gradient.

    16- and 8-bit floats are added in float32 and rounded once. The result has the type of the
    gradients. A NaN becomes the quiet NaN without sign and payload. A single gradient is returned
    unchanged.

    >>> mean_in_order([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]).tolist()
    [2.0, 3.5]
    """
    first = gradients[0]
    if len(gradients) == 1:
        return first
    total = first.float() if first.is_floating_point() and first.itemsize < 4 else first
    for gradient in gradients[1:]:
        # Converts the gradient, because torch cannot add 8-bit floats to other types.
        total.add_(gradient.to(total.dtype))
    parts = torch.view_as_real(total) if total.is_complex() else total
    parts.div_(len(gradients))
    # The sum of inf and -inf is NaN too. Then no element is NaN, and `masked_fill_` does nothing.
    if parts.sum().isnan():
        parts.masked_fill_(parts.isnan(), torch.nan)
    return total.to(first.dtype)
