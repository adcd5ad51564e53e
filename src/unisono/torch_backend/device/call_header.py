"""The header that each rank sends for a new kind of call on a device, and the check that all
headers agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from unisono.errors import MismatchError
from unisono.torch_backend.device.peer_device import Words
from unisono.types import DType, Op, ReduceOp

DIVIDES_INPUT = frozenset((Op.SCATTER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL))
"""Operations whose input has a piece for each rank."""

DIVIDES_OUTPUT = frozenset((Op.GATHER, Op.ALL_GATHER, Op.ALL_TO_ALL))
"""Operations whose output has a piece of each rank."""

_OPS = tuple(Op)
_FIXED = 6  # operation, element type, reduction, root, numbers of input and of output pieces


class DeviceRequest(NamedTuple):
    """A collective on contiguous device memory."""

    op: Op
    dtype: DType
    reduction: ReduceOp = ReduceOp.SUM
    root: int | None = None
    inputs: tuple[int, ...] = ()
    """Bytes of each piece of this rank's input."""
    outputs: tuple[int, ...] = ()
    """Bytes of each piece of this rank's output."""

    def __str__(self) -> str:
        root = "" if self.root is None else f", root {self.root}"
        reduction = f", {self.reduction.name.lower()}" if self.op.reduces else ""
        sizes = " and ".join(
            f"{name} of {'+'.join(map(str, pieces))} bytes"
            for name, pieces in (("input", self.inputs), ("output", self.outputs))
            if pieces
        )
        sizes = f", {sizes}" if sizes else ""
        return f"{self.op}({self.dtype.name.lower()}{reduction}{root}{sizes})"


def barrier_request() -> DeviceRequest:
    """Returns the request of a barrier, which moves no data."""
    return DeviceRequest(Op.BARRIER, DType.UINT8)


def request_words(ranks: int) -> int:
    """Returns the length of an encoded request."""
    return _FIXED + 2 * ranks


def encode(request: DeviceRequest, ranks: int) -> Words:
    """Returns a request as `request_words(ranks)` words."""
    words = np.zeros(request_words(ranks), np.int64)
    root = -1 if request.root is None else request.root
    inputs, outputs = request.inputs, request.outputs
    kind = _OPS.index(request.op), request.dtype, request.reduction, root
    words[:_FIXED] = *kind, len(inputs), len(outputs)
    words[_FIXED : _FIXED + len(inputs)] = inputs
    words[_FIXED + ranks : _FIXED + ranks + len(outputs)] = outputs
    return words


def decode(words: Words, ranks: int) -> DeviceRequest:
    """Returns the request of encoded words."""
    op, dtype, reduction, root, inputs, outputs = words[:_FIXED].tolist()
    return DeviceRequest(
        op=_OPS[op],
        dtype=DType(dtype),
        reduction=ReduceOp(reduction),
        root=None if root < 0 else root,
        inputs=tuple(words[_FIXED : _FIXED + inputs].tolist()),
        outputs=tuple(words[_FIXED + ranks : _FIXED + ranks + outputs].tolist()),
    )


def require_equal_calls(requests: Sequence[DeviceRequest]) -> None:
    """Raises `MismatchError` if the ranks made different calls."""
    first = requests[0][:4]
    for rank, request in enumerate(requests):
        if request[:4] != first:
            raise MismatchError(
                f"the ranks made different calls on the device: rank 0 called {requests[0]}, "
                f"rank {rank} called {request}"
            )


def require_matching(requests: Sequence[DeviceRequest]) -> None:
    """Raises `MismatchError` unless the ranks made one call with pieces of equal lengths where one
    rank sends and another one receives."""
    require_equal_calls(requests)
    op, root = requests[0].op, requests[0].root
    if op is Op.BARRIER:
        return
    everyone = range(len(requests))
    for sender in [root] if op in (Op.BROADCAST, Op.SCATTER) else everyone:
        for receiver in [root] if op in (Op.REDUCE, Op.GATHER) else everyone:
            assert sender is not None and receiver is not None
            sent = receiver if op in DIVIDES_INPUT else 0
            received = sender if op in DIVIDES_OUTPUT else 0
            require_equal_lengths(
                requests,
                (sender, sent, requests[sender].inputs[sent]),
                (receiver, received, requests[receiver].outputs[received]),
            )


def require_equal_lengths(
    requests: Sequence[DeviceRequest], source: tuple[int, int, int], target: tuple[int, int, int]
) -> None:
    """Raises `MismatchError` for a move between places of different lengths.

    `source` and `target`: rank, number of the piece, and bytes.
    """
    if source[2] != target[2]:
        raise MismatchError(
            f"{requests[0].op}: rank {source[0]} sends {source[2]} bytes of its input piece "
            f"{source[1]} where rank {target[0]} expects {target[2]} bytes in its output piece "
            f"{target[1]}; rank {source[0]} called {requests[source[0]]}, rank {target[0]} called "
            f"{requests[target[0]]}"
        )
