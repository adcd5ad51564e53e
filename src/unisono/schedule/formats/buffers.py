"""Buffers of an MSCCL or MSCCL++ program: the input, output and scratch of each GPU.

Both formats number the chunks of three buffers on each GPU. `Buffers` maps each input cell to the
chunk that the cell holds before the program, and each output cell to the chunk that the cell must
hold after the program. `Buffers` also maps each cell to its memory in an in-place call, and to its
location in a schedule.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from unisono.errors import UnsupportedError
from unisono.schedule.collective import Collective
from unisono.types import Op


class Buffer(StrEnum):
    """The buffers of a GPU, with the names that the files use."""

    INPUT = "i"
    OUTPUT = "o"
    SCRATCH = "s"


class Cell(NamedTuple):
    """One chunk of one buffer of one GPU."""

    gpu: int
    buffer: Buffer
    chunk: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.chunk}] of gpu {self.gpu}"


_OPERATIONS = {
    "allreduce": Op.ALL_REDUCE,
    "allgather": Op.ALL_GATHER,
    "reducescatter": Op.REDUCE_SCATTER,
    "alltoall": Op.ALL_TO_ALL,
    "broadcast": Op.BROADCAST,
    "reduce": Op.REDUCE,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
}


def operation(name: str) -> Op:
    """Returns the operation that a file calls `name`. Raises `UnsupportedError` for an unknown
    name.

    >>> operation("reduce_scatter").value
    'reduce_scatter'
    """
    op = _OPERATIONS.get(name.lower().replace("_", "").replace("-", ""))
    if op is None:
        raise UnsupportedError(
            f"unsupported operation {name!r}; expected one of {', '.join(_OPERATIONS)}"
        )
    return op


def operation_name(op: Op) -> str:
    """Returns the name of an operation in both formats, or raises `UnsupportedError`."""
    for name, known in _OPERATIONS.items():
        if known is op:
            return name
    raise UnsupportedError(f"MSCCL and MSCCL++ files cannot express {op}")


def pieces(op: Op, ranks: int) -> int:
    """Returns the number of pieces of a GPU's input or output, whichever is larger.

    The number of chunks per loop in a file is this number times the number of parts of a piece.
    """
    return 1 if op in (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE) else ranks


class Buffers:
    """Cells of a collective. With `in_place`, input and output are the same memory."""

    def __init__(self, collective: Collective, *, in_place: bool) -> None:
        self.collective = collective
        self.in_place = in_place
        parts = collective.parts
        self._inputs: dict[Cell, int] = {}
        self._outputs: dict[Cell, int] = {}
        self._same: dict[Cell, Cell] = {}
        for rank in range(collective.ranks):
            for chunk in collective.initial(rank):
                ref = collective.input_ref(rank, chunk)
                assert ref is not None
                self._inputs[Cell(rank, Buffer.INPUT, ref[0] * parts + ref[1])] = chunk
            for chunk in collective.wanted(rank):
                ref = collective.output_ref(rank, chunk)
                assert ref is not None
                self._outputs[Cell(rank, Buffer.OUTPUT, ref[0] * parts + ref[1])] = chunk
        if in_place:
            self._alias()
        self._locations = {self.memory(cell): chunk for cell, chunk in self._inputs.items()}
        self._locations |= {self.memory(cell): chunk for cell, chunk in self._outputs.items()}

    def _alias(self) -> None:
        parts = self.collective.parts
        for rank in range(self.collective.ranks):
            for piece in range(self.collective.input_pieces(rank)):
                other = self.collective.in_place_output(rank, piece)
                if other is not None:
                    for part in range(parts):
                        output = Cell(rank, Buffer.OUTPUT, other * parts + part)
                        self._same[output] = Cell(rank, Buffer.INPUT, piece * parts + part)

    def memory(self, cell: Cell) -> Cell:
        """Returns the cell that represents all cells with the same memory."""
        return self._same.get(cell, cell)

    def initial(self) -> dict[Cell, int]:
        """Returns the memory cells that hold contributions before the program, each with its
        chunk.
        """
        return {self.memory(cell): chunk for cell, chunk in self._inputs.items()}

    def expected(self) -> dict[Cell, int]:
        """Returns the output cells, each with the chunk that it must hold after the program."""
        return self._outputs

    def size(self, rank: int, buffer: Buffer) -> int | None:
        """Returns the number of chunks of a GPU's input or output, or None for scratch."""
        if buffer is Buffer.SCRATCH:
            return None
        count = (
            self.collective.input_pieces(rank)
            if buffer is Buffer.INPUT
            else self.collective.output_pieces(rank)
        )
        return count * self.collective.parts

    def location(self, memory: Cell) -> int | None:
        """Returns the location of a schedule that corresponds to this memory, or None for
        scratch.
        """
        return self._locations.get(memory)
