"""The header that each rank sends for a call on a device, and the check that all headers agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.errors import MismatchError
from unisono.torch_backend.device.peer_device import EXPORT_WORDS, Words
from unisono.types import DType, Op, ReduceOp

_OPS = tuple(Op)
_FIXED = 5  # operation, element type, reduction, root, and 1 + the number of output pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
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


def header_words(ranks: int) -> int:
    """Returns the length of a header."""
    return _FIXED + 1 + 2 * ranks + 2 * EXPORT_WORDS


def encode(request: DeviceRequest, ranks: int, memories: Sequence[Words | None]) -> Words:
    """Returns the header of a request. `memories`: the exported input and output."""
    words = np.zeros(header_words(ranks), np.int64)
    root = -1 if request.root is None else request.root
    words[:_FIXED] = (
        _OPS.index(request.op),
        request.dtype,
        request.reduction,
        root,
        len(request.inputs),
    )
    words[_FIXED] = len(request.outputs)
    at = _FIXED + 1
    words[at : at + len(request.inputs)] = request.inputs
    at += ranks
    words[at : at + len(request.outputs)] = request.outputs
    for memory, start in zip(memories, _memory_starts(ranks), strict=True):
        if memory is not None:
            words[start : start + EXPORT_WORDS] = memory
    return words


def decode(words: Words, ranks: int) -> DeviceRequest:
    """Returns the request of a header."""
    op, dtype, reduction, root, inputs, outputs = words[: _FIXED + 1].tolist()
    at = _FIXED + 1
    return DeviceRequest(
        op=_OPS[op],
        dtype=DType(dtype),
        reduction=ReduceOp(reduction),
        root=None if root < 0 else root,
        inputs=tuple(words[at : at + inputs].tolist()),
        outputs=tuple(words[at + ranks : at + ranks + outputs].tolist()),
    )


def call_words(ranks: int) -> slice:
    """Returns the part of a header that describes the call, without memory."""
    return slice(0, _FIXED + 1 + 2 * ranks)


def memory_words(words: Words, ranks: int, *, is_output: bool) -> Words:
    """Returns the part of a header with which the rank's input or output can be opened."""
    start = _memory_starts(ranks)[is_output]
    return words[start : start + EXPORT_WORDS]


def require_equal_calls(requests: Sequence[DeviceRequest]) -> None:
    """Raises `MismatchError` if the ranks made different calls."""
    kinds = [(each.op, each.dtype, each.reduction, each.root) for each in requests]
    first = kinds[0]
    for rank, kind in enumerate(kinds):
        if kind != first:
            raise MismatchError(
                f"the ranks made different calls on the device: rank 0 called {requests[0]}, "
                f"rank {rank} called {requests[rank]}"
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


def _memory_starts(ranks: int) -> tuple[int, int]:
    start = _FIXED + 1 + 2 * ranks
    return start, start + EXPORT_WORDS
