"""Checks of a submission's arguments, before other ranks hear of the tensor.

A wrong argument that only the transfer noticed would end the controller with all of its tensors.
"""

from __future__ import annotations

import math

from unisono.communicator import as_integer, check_rank, check_writable, dtype_of
from unisono.controller.handle import IN_PLACE
from unisono.controller.request import Request
from unisono.controller.transfers.transfer import Array
from unisono.errors import UnsupportedError
from unisono.types import DType, ReduceOp

_REDUCING = ("all_reduce", "reduce_scatter")
_SHARED = ("reduce_scatter", "all_to_all")


def plain_name(name: str) -> str:
    """Returns the name as a `str`, because comparing a subclass may run Python code. Raises
    `TypeError` unless it is a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {name!r}")
    return str.__str__(name)


class ArgumentChecks:
    """Checks the submissions of one rank. Errors name the tensor."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks

    def checked_root(self, name: str, array: Array, operation: str, root: int) -> int:
        """Returns the root as an int, after a check of the root and of the array.

        Raises `TypeError` or `ValueError` unless the root is a rank, and unless `array` is an array
        to which this rank can write if the operation changes it.
        """
        what = f"tensor {name!r}: "
        if operation == "broadcast":
            check_rank(root, self._ranks, f"{what}root")
            root = as_integer(root, "root")
        if operation in IN_PLACE and root != self._rank:  # the root only sends its array
            check_writable(array, what)
        else:
            dtype_of(array, what)
        return root

    def check(self, request: Request) -> None:
        """Raises `UnsupportedError` or `ValueError` if no transfer could serve the request."""
        what = f"tensor {request.name!r}: {request.operation}"
        if request.operation in _REDUCING:
            supported = reductions_of(request.dtype)
            if request.op not in supported:
                raise UnsupportedError(
                    f"{what} of {request.dtype.name.lower()}: op: expected one of "
                    f"{', '.join(supported)}, not {request.op!r}"
                )
        if request.operation in _SHARED and math.prod(request.shape) % self._ranks:
            raise ValueError(
                f"{what} on {self._ranks} ranks: expected a multiple of {self._ranks} elements, "
                f"not {math.prod(request.shape)} (shape {request.shape})"
            )


def reductions_of(dtype: DType) -> tuple[str, ...]:
    """Returns the names of the reductions of this element type that a controller runs.

    >>> reductions_of(DType.FLOAT32)
    ('sum', 'prod', 'min', 'max', 'avg')
    """
    return tuple(
        op.name.lower()
        for op in ReduceOp
        if op is not ReduceOp.PREMUL_SUM and dtype.supports(op)  # a plan keeps no factors
    )
