"""What one measurement is: an operation on a number of ranks, with size, type and reduction."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
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
    uneven: bool = False
    """The pieces differ in length."""
    paired: bool = False
    """Messages between ranks 0 and 1, 2 and 3, ...: all pairs at once."""
    bus_numerator: int = 1
    """Bus factor: numerator x (n-1)/n where `bus_scales`, otherwise 1."""
    bus_scales: bool = True

    def bus_factor(self, ranks: int) -> float:
        """What algorithm bandwidth is multiplied by to compare with the hardware's; of messages
        between pairs, what all pairs move together."""
        if self.paired:
            return ranks / 2
        return self.bus_numerator * (ranks - 1) / ranks if self.bus_scales else 1.0


_EVEN = {
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
    "ping_pong": Operation(paired=True),
    "stream": Operation(paired=True),
    "barrier": Operation(in_place=True, bus_scales=False),
}
_SPLIT = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
OPERATIONS = _EVEN | {f"{op}_v": replace(_EVEN[op], uneven=True) for op in _SPLIT}

ARITHMETIC = ("sum", "prod", "min", "max", "avg")
BITWISE = ("band", "bor", "bxor")
LOGICAL = ("land", "lor", "lxor")
PLACES = ("minloc", "maxloc")
REDUCTIONS = (*ARITHMETIC, *BITWISE, *LOGICAL, *PLACES)

BIT_PATTERNS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""NumPy lacks these types: their buffers hold the bits."""
PAIRS = {
    "float32_int32": ("float32", "int32"),
    "float64_int64": ("float64", "int64"),
    "int32_int32": ("int32", "int32"),
    "int64_int64": ("int64", "int64"),
}
"""Values with an index, of which the least or largest is looked for."""
MOST_OUTSTANDING, LEAST_OUTSTANDING = 64, 4
"""Messages of a stream that are under way at once: fewer of those that are large."""
OUTSTANDING_BYTES = 128 << 20
STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype(BIT_PATTERNS.get(name, name))
    for name in (
        *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("bool", "complex64", "complex128"),
    )
} | {name: np.dtype([("value", value), ("index", index)]) for name, (value, index) in PAIRS.items()}


def reductions_of(dtype: str, op: str) -> tuple[str, ...]:
    """Reductions of this operation whose result is beyond doubt for this element type.

    >>> reductions_of("complex64", "all_reduce"), reductions_of("complex64", "scan")
    (('sum', 'avg'), ('sum',))
    """
    if dtype in PAIRS:
        return PLACES
    if dtype == "bool":
        return ("min", "max", *BITWISE, *LOGICAL)
    known: tuple[str, ...] = (*ARITHMETIC, *BITWISE, *LOGICAL)
    if "float" in dtype:
        known = ARITHMETIC
    elif dtype.startswith("complex"):
        known = ("sum", "avg")
    return tuple(r for r in known if not (r == "avg" and OPERATIONS[op].scans))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement. `nbytes` is what was asked for; `size_bytes` is what fits the pieces.

    The size is that of the larger buffer of a rank, as in nccl-tests: all_gather's out,
    reduce_scatter's x, both buffers of all_to_all.

    The pieces of the v forms grow from rank to rank as 1, 2, 3, ...: the first ranks have nothing
    where there is little.

    >>> Case(op="all_gather", ranks=4, nbytes=1024).shares
    (64, 64, 64, 64)
    >>> Case(op="all_gather_v", ranks=4, nbytes=1000).shares
    (25, 50, 75, 100)
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
        if self.operation.paired and self.ranks % 2:
            raise ValueError(f"{self.op} is between pairs of ranks: {self.ranks} ranks are odd")
        defined = reductions_of(self.dtype, self.op)
        if self.operation.reduces and self.redop not in defined:
            raise ValueError(
                f"{self.op}: {self.redop} is not defined here for {self.dtype}, "
                f"but {', '.join(defined)}"
            )

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
    def count(self) -> int:
        """Elements of the larger buffer. Pieces of one length have at least one each, so that tiny
        sizes still move something; so have the v forms in all."""
        if self.op == "barrier" or self.nbytes == 0:
            return 0
        alike = 1 if self.operation.uneven else self.pieces
        return max(1, self.nbytes // self.storage.itemsize // alike) * alike

    @property
    def shares(self) -> tuple[int, ...]:
        """Elements of each piece of the larger buffer; by rank, where each has one."""
        count, n = self.count, self.pieces
        if not self.operation.uneven:
            return (count // n,) * n
        ends = [count * rank * (rank + 1) // (n * (n + 1)) for rank in range(n + 1)]
        return tuple(end - start for start, end in pairwise(ends))

    def lengths(self, rank: int) -> tuple[int, ...]:
        """Elements of what this rank has for each other, or gets from each, where that is split.

        In an all_to_all_v these are the shares, turned by the rank: so both are the same, and all
        ranks have as much.
        """
        turned = rank if self.op == "all_to_all_v" else 0
        return self.shares[turned:] + self.shares[:turned]

    def piece(self, rank: int) -> int:
        """Elements of this rank's buffer where it is not split."""
        return self.shares[rank % self.pieces]

    @property
    def size_bytes(self) -> int:
        return self.count * self.storage.itemsize

    @property
    def outstanding(self) -> int:
        """Messages of a rank that are under way at once.

        >>> [Case(op="stream", ranks=2, nbytes=n << 20).outstanding for n in (1, 4, 64)]
        [64, 32, 4]
        """
        if self.op != "stream":
            return 1
        fitting = OUTSTANDING_BYTES // max(1, self.size_bytes)
        return min(MOST_OUTSTANDING, max(LEAST_OUTSTANDING, fitting))

    @property
    def messages(self) -> int:
        """Messages of a call, one after another: a call's time over this is shown. Those of a
        ping_pong go to and fro."""
        return 2 if self.op == "ping_pong" else self.outstanding

    def sends(self, rank: int) -> tuple[int, int]:
        """Of messages between pairs: how many a rank sends in a call, and elements of each.

        In a stream even ranks send, and odd ones answer with an element when all is there.
        """
        if self.op == "stream" and rank % 2:
            return 1, min(1, self.count)
        return self.outstanding, self.count

    def receives(self, rank: int) -> tuple[int, int]:
        """The same of what it receives."""
        return self.sends(rank ^ 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
