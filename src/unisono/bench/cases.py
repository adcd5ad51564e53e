"""Cases to measure. A case is an operation with a number of ranks, a size, an element type and a
reduction."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The layout of an operation's buffers `x` and `out`, and the operation's bus factor as in
    nccl-tests."""

    x_split: bool = False
    """True if the input x has one piece per rank; otherwise x is a single piece."""
    out_split: bool = False
    in_place: bool = False
    """True if the result is written to x, without a buffer out."""
    reduces: bool = False
    rooted: bool = False
    scans: bool = False
    """True if a rank's result depends only on the rank itself and on lower ranks."""
    uneven: bool = False
    """True if the pieces have different lengths."""
    paired: bool = False
    """True if messages are sent between ranks 0 and 1, 2 and 3, and so on, by all pairs at the same
    time."""
    bus_numerator: int = 1
    """Numerator of the bus factor. The bus factor on n ranks is this numerator x (n-1)/n if
    `bus_scales` is true, else 1."""
    bus_scales: bool = True

    def bus_factor(self, ranks: int) -> float:
        """Returns the ratio of bus bandwidth to algorithm bandwidth. For messages between pairs,
        the ratio is the number of pairs."""
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
    "put": Operation(bus_scales=False),
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
"""Element types that NumPy does not have, and the integer types of their buffers, which contain the
bits."""
PAIRS = {
    "float32_int32": ("float32", "int32"),
    "float64_int64": ("float64", "int64"),
    "int32_int32": ("int32", "int32"),
    "int64_int64": ("int64", "int64"),
}
"""Element types that consist of a value and an index, for minloc and maxloc."""
MOST_OUTSTANDING, LEAST_OUTSTANDING = 64, 4
"""Maximum and minimum number of outstanding messages in a stream; large messages have fewer."""
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
    """Returns the reductions that an operation supports for this element type.

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
    """One case to measure. `nbytes` is the requested size. `size_bytes` is the size that is
    measured, at which each piece has a whole number of elements.

    The size is the size of a rank's larger buffer, as in nccl-tests: of the output of all_gather,
    the input of reduce_scatter, or either buffer of all_to_all.

    In v-collectives, the lengths of the ranks' pieces are proportional to 1, 2, 3, ... With small
    sizes, the first ranks have empty pieces.

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
            raise ValueError(f"{self.op} needs an even number of ranks, got {self.ranks}")
        defined = reductions_of(self.dtype, self.op)
        if self.operation.reduces and self.redop not in defined:
            raise ValueError(
                f"{self.op}: {self.redop} is not supported for {self.dtype}; supported: "
                f"{', '.join(defined)}"
            )

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.op]

    @property
    def storage(self) -> np.dtype[Any]:
        return STORAGE[self.dtype]

    @property
    def pieces(self) -> int:
        """Number of pieces of the larger buffer: one per rank, or 1 if the buffer is not split."""
        return self.ranks if self.operation.x_split or self.operation.out_split else 1

    @property
    def count(self) -> int:
        """Number of elements of the larger buffer. Pieces of equal length have at least one
        element, so that data are sent even for tiny sizes. In v-collectives, all pieces together
        have at least one element."""
        if self.op == "barrier" or self.nbytes == 0:
            return 0
        equal_pieces = 1 if self.operation.uneven else self.pieces
        return max(1, self.nbytes // self.storage.itemsize // equal_pieces) * equal_pieces

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of elements of each piece of the larger buffer. If the buffer has one piece per
        rank, the numbers are ordered by rank."""
        count, n = self.count, self.pieces
        if not self.operation.uneven:
            return (count // n,) * n
        ends = [count * rank * (rank + 1) // (n * (n + 1)) for rank in range(n + 1)]
        return tuple(end - start for start, end in pairwise(ends))

    def lengths(self, rank: int) -> tuple[int, ...]:
        """Returns the lengths of the pieces in a rank's split buffer. Each piece is sent to one
        rank or received from one rank.

        In an all_to_all_v, the lengths are `shares`, rotated by the rank. Send and receive lengths
        are therefore equal, and the total is the same on all ranks.
        """
        rotation = rank if self.op == "all_to_all_v" else 0
        return self.shares[rotation:] + self.shares[:rotation]

    def piece(self, rank: int) -> int:
        """Returns the number of elements of a rank's buffer that has only one piece."""
        return self.shares[rank % self.pieces]

    @property
    def size_bytes(self) -> int:
        return self.count * self.storage.itemsize

    @property
    def outstanding(self) -> int:
        """Largest number of a rank's messages that are under way at the same time.

        >>> [Case(op="stream", ranks=2, nbytes=n << 20).outstanding for n in (1, 4, 64)]
        [64, 32, 4]
        """
        if self.op != "stream":
            return 1
        fitting = OUTSTANDING_BYTES // max(1, self.size_bytes)
        return min(MOST_OUTSTANDING, max(LEAST_OUTSTANDING, fitting))

    @property
    def messages(self) -> int:
        """Number of successive messages in a call. The time of a call is divided by this number to
        get the time per message. A ping_pong has one message in each direction."""
        return 2 if self.op == "ping_pong" else self.outstanding

    def sends(self, rank: int) -> tuple[int, int]:
        """Returns the number of messages that a rank sends to its partner in a call, and the number
        of elements of each message.

        In a stream, even ranks send. Odd ranks answer with one element after all messages have
        arrived.
        """
        if self.op == "stream" and rank % 2:
            return 1, min(1, self.count)
        return self.outstanding, self.count

    def receives(self, rank: int) -> tuple[int, int]:
        """Returns the number of messages that a rank receives in a call, and the number of elements
        of each message."""
        return self.sends(rank ^ 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
