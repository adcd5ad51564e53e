"""Collectives through host memory, divided into blocks.

A block has the same bytes of each piece of the inputs and outputs. So a block of a collective is
the same collective on shorter pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from unisono.torch_backend.device.call_header import (
    DIVIDES_INPUT,
    DIVIDES_OUTPUT,
    DeviceRequest,
)
from unisono.types import Op

BLOCK_BYTES: Final = 4 << 20
"""Bytes of all pieces of a block together, at most."""

_ALIGNMENT = 16  # the largest element


class HostBlocks:
    """The blocks of a collective that all ranks have requested; equal on all ranks."""

    def __init__(
        self, requests: Sequence[DeviceRequest], rank: int, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._requests, self._rank = requests, rank
        own, op = requests[rank], requests[rank].op
        self.op, self._root, self._reduction = op, own.root, own.reduction
        pieces = len(requests) if op in DIVIDES_INPUT | DIVIDES_OUTPUT else 1
        self._step = max(_ALIGNMENT, block_bytes // pieces // _ALIGNMENT * _ALIGNMENT)
        longest = max(max((*each.inputs, *each.outputs), default=0) for each in requests)
        self.count = max(1, -(-longest // self._step))

    def inputs(self, number: int) -> list[tuple[int, int]]:
        """Returns the first byte and the length of each part of this rank's input in a block."""
        return list(self._parts(self._requests[self._rank].inputs, number))

    def outputs(self, number: int) -> list[tuple[int, int]]:
        """Returns the first byte and the length of each part of this rank's output in a block."""
        return list(self._parts(self._requests[self._rank].outputs, number))

    def exchange(
        self, comm: Any, number: int, sent: torch.Tensor | None, received: torch.Tensor | None
    ) -> None:
        """Performs a block. The tensors have the block's parts one after the other. Operations in
        place use `received`, or `sent` on a rank without output."""
        op, root = self.op, self._root
        both = sent if received is None else received
        if op is Op.ALL_REDUCE:
            comm.all_reduce(both, self._reduction)
        elif op is Op.REDUCE:
            comm.reduce(both, root, self._reduction)
        elif op is Op.BROADCAST:
            comm.broadcast(both, root)
        elif op is Op.ALL_TO_ALL:
            self._all_to_all(comm, number, sent, received)
        else:
            self._one_sided(comm, number, sent, received)

    def _all_to_all(self, comm: Any, number: int, sent: Any, received: Any) -> None:
        table = [self._counts(each.inputs, number, sent) for each in self._requests]
        if len({count for row in table for count in row}) == 1:
            comm.all_to_all(sent, received)
        else:
            comm.all_to_all_v(sent, table, None, received)

    def _one_sided(self, comm: Any, number: int, sent: Any, received: Any) -> None:
        """Performs an operation with one piece for each rank, on one side."""
        if self.op in DIVIDES_INPUT:
            sizes = [each.outputs[0] for each in self._requests]
        else:
            sizes = [each.inputs[0] for each in self._requests]
        counts = self._counts(sizes, number, received if sent is None else sent)
        is_even, root = len(set(counts)) == 1, self._root
        match self.op, is_even:
            case Op.ALL_GATHER, True:
                comm.all_gather(sent, received)
            case Op.ALL_GATHER, False:
                comm.all_gather_v(sent, counts, received)
            case Op.REDUCE_SCATTER, True:
                comm.reduce_scatter(sent, received, self._reduction)
            case Op.REDUCE_SCATTER, False:
                comm.reduce_scatter_v(sent, counts, received, self._reduction)
            case Op.GATHER, True:
                comm.gather(sent, received, root)
            case Op.GATHER, False:
                comm.gather_v(sent, counts, root, received)
            case Op.SCATTER, True:
                comm.scatter(sent, received, root)
            case _:
                comm.scatter_v(sent, counts, root, received)

    def _counts(self, sizes: Sequence[int], number: int, like: torch.Tensor) -> list[int]:
        """Returns the elements of each piece in a block."""
        return [length // like.element_size() for _, length in self._parts(sizes, number)]

    def _parts(self, sizes: Sequence[int], number: int) -> Iterator[tuple[int, int]]:
        for size, start in zip(sizes, itertools.accumulate(sizes, initial=0), strict=False):
            first = min(number * self._step, size)
            yield start + first, min(size - first, self._step)
