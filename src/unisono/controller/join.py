"""Contributions of a rank that called `join`. They do not change the results of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.communicator import empty_like
from unisono.controller.request import Request
from unisono.controller.transfers.transfer import Array, Job
from unisono.types import DType


class JoinedTensors:
    """Makes the arrays that a joined rank contributes. They are like the arrays that this rank has
    submitted (such as torch tensors), or NumPy arrays if it has submitted none of the element type.
    """

    def __init__(self) -> None:
        self._samples: dict[DType, Array] = {}

    def remember(self, array: Array, dtype: DType) -> None:
        """Keeps an empty array like `array`, as a pattern for later contributions of this element
        type.
        """
        if dtype not in self._samples:
            self._samples[dtype] = empty_like(array, (0,))

    def job(self, requests: Sequence[Request], op: str) -> Job:
        """Returns the job by which this rank takes part in a collective of tensors that it does not
        have.
        """
        first = requests[0]
        return Job(
            operation=first.operation,
            arrays=tuple(self._neutral(request, op) for request in requests),
            op=op,
            root=first.root,
        )

    def stand_in(self, requests: Sequence[Request]) -> Job:
        """Returns the job by which this rank votes against a collective of tensors that it does not
        have.
        """
        first = requests[0]
        return Job(
            operation=first.operation,
            arrays=tuple(self._empty(request, request.shape) for request in requests),
            op=first.op,
            root=first.root,
            names=tuple(request.name for request in requests),
        )

    def _neutral(self, request: Request, op: str) -> Array:
        shape = request.shape
        if request.operation == "all_gather":
            shape = (0, *shape[1:])
        array = self._empty(request, shape)
        array[...] = neutral_value(request.dtype, op)
        return array

    def _empty(self, request: Request, shape: tuple[int, ...]) -> Array:
        sample = self._samples.get(request.dtype)
        if sample is None:
            sample = np.empty(0, np.dtype(request.dtype.name.lower()))
        return empty_like(sample, shape)


def neutral_value(dtype: DType, op: str) -> Any:
    """Returns the value that changes no result of the reduction `op`.

    >>> neutral_value(DType.INT8, "max"), neutral_value(DType.FLOAT32, "min")
    (-128, inf)
    """
    if op in ("sum", "avg", "bor", "bxor", "lor", "lxor"):
        return 0
    if op in ("prod", "product", "land"):
        return 1
    if dtype is DType.BOOL:
        return op in ("min", "band")
    if dtype.is_float:
        return np.inf if op == "min" else -np.inf
    kind = np.iinfo(dtype.name.lower())
    if op == "band":
        return kind.max if kind.min == 0 else -1
    return kind.max if op == "min" else kind.min
