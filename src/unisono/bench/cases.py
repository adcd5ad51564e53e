"""What one measurement is: an operation on a number of ranks, with size, type and reduction."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Shape of one operation's buffers, and its bus factor in nccl-tests' terms."""

    x_split: bool = False
    """x consists of one piece per rank (otherwise of a single piece)."""
    out_split: bool = False
    in_place: bool = False
    """The result lands in x; there is no out."""
    reduces: bool = False
    rooted: bool = False
    scans: bool = False
    """A rank's result is of the ranks below it."""
    bus_numerator: int = 1
    """Bus factor: numerator x (n-1)/n where `bus_scales`, otherwise 1."""
    bus_scales: bool = True

    def bus_factor(self, ranks: int) -> float:
        """What algorithm bandwidth is multiplied by to compare with the hardware's."""
        return self.bus_numerator * (ranks - 1) / ranks if self.bus_scales else 1.0


OPERATIONS = {
    "all_reduce": Operation(in_place=True, reduces=True, bus_numerator=2),
    "reduce_scatter": Operation(x_split=True, reduces=True),
    "all_gather": Operation(out_split=True),
    "all_to_all": Operation(x_split=True, out_split=True),
    "broadcast": Operation(in_place=True, rooted=True, bus_scales=False),
    "reduce": Operation(in_place=True, reduces=True, rooted=True, bus_scales=False),
    "gather": Operation(out_split=True, rooted=True),
    "scatter": Operation(x_split=True, rooted=True),
    "scan": Operation(in_place=True, reduces=True, scans=True, bus_scales=False),
    "exscan": Operation(in_place=True, reduces=True, scans=True, bus_scales=False),
    "send_recv": Operation(bus_scales=False),
    "barrier": Operation(in_place=True, bus_scales=False),
}

REDUCTIONS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")

# NumPy has no bfloat16: its buffers hold the bit patterns.
STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype("uint16" if name == "bfloat16" else name)
    for name in (
        *("float32", "float64", "float16", "bfloat16"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("bool", "complex64", "complex128"),
    )
}


def reductions_of(dtype: str, op: str) -> tuple[str, ...]:
    """Reductions of this operation whose result is beyond doubt for this element type.

    >>> reductions_of("complex64", "all_reduce"), reductions_of("complex64", "scan")
    (('sum', 'avg'), ('sum',))
    """
    if dtype == "bool":
        return ("min", "max", "band", "bor", "bxor")
    known: tuple[str, ...] = REDUCTIONS[:5] if "float" in dtype else REDUCTIONS
    known = ("sum", "avg") if dtype.startswith("complex") else known
    return tuple(r for r in known if not (r == "avg" and OPERATIONS[op].scans))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement. `nbytes` is what was asked for; `size_bytes` is what fits the pieces.

    The size is that of the larger buffer of a rank, as in nccl-tests: all_gather's out,
    reduce_scatter's x, both buffers of all_to_all.

    >>> Case(op="all_gather", ranks=4, nbytes=1024).piece_count
    64
    """

    op: str
    ranks: int
    nbytes: int
    dtype: str = "float32"
    redop: str = "sum"
    root: int = 0

    def __post_init__(self) -> None:
        if self.op not in OPERATIONS:
            raise ValueError(f"unknown operation {self.op!r}; known: {', '.join(OPERATIONS)}")
        if self.dtype not in STORAGE:
            raise ValueError(f"unknown element type {self.dtype!r}; known: {', '.join(STORAGE)}")
        if self.redop not in REDUCTIONS:
            raise ValueError(f"unknown reduction {self.redop!r}; known: {', '.join(REDUCTIONS)}")
        if not 0 <= self.root < self.ranks:
            raise ValueError(f"root {self.root} is not one of {self.ranks} ranks")
        if self.operation.reduces and self.redop not in reductions_of(self.dtype, self.op):
            raise ValueError(f"{self.op}: {self.redop} is not defined here for {self.dtype}")

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.op]

    @property
    def storage(self) -> np.dtype[Any]:
        return STORAGE[self.dtype]

    @property
    def pieces(self) -> int:
        """Pieces of the larger buffer."""
        return self.ranks if self.operation.x_split or self.operation.out_split else 1

    @property
    def piece_count(self) -> int:
        """Elements of one piece: at least one, so that tiny sizes still move something."""
        if self.op == "barrier" or self.nbytes == 0:
            return 0
        return max(1, self.nbytes // self.storage.itemsize // self.pieces)

    @property
    def count(self) -> int:
        """Elements of the larger buffer."""
        return self.piece_count * self.pieces

    @property
    def size_bytes(self) -> int:
        return self.count * self.storage.itemsize

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
