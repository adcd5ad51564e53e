"""The vocabulary that every layer shares: element types, reductions, operations."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class DType(IntEnum):
    """Element types. The values are those of `csrc/core/types.h`."""

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT8 = 4
    UINT8 = 5
    INT16 = 6
    UINT16 = 7
    INT32 = 8
    UINT32 = 9
    INT64 = 10
    UINT64 = 11
    BOOL = 12
    COMPLEX64 = 13
    COMPLEX128 = 14
    FLOAT8_E4M3FN = 15
    FLOAT8_E5M2 = 16
    # Pairs of a value and an index of the same size, as MINLOC and MAXLOC take them.
    FLOAT32_INT32 = 17
    FLOAT64_INT64 = 18
    INT32_INT32 = 19
    INT64_INT64 = 20

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return _SIZE_BYTES[self]

    @property
    def is_float8(self) -> bool:
        """Whether this is one of the 8-bit floats (those of the OCP specification, as in torch)."""
        return self in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)

    @property
    def is_narrow_float(self) -> bool:
        """Whether sums of this type accumulate in float32 and are rounded once."""
        return self in (DType.FLOAT16, DType.BFLOAT16) or self.is_float8

    @property
    def is_float(self) -> bool:
        """Whether this is a real floating-point type."""
        return self in (DType.FLOAT32, DType.FLOAT64) or self.is_narrow_float

    @property
    def is_pair(self) -> bool:
        """Whether an element is a value and an index."""
        return DType.FLOAT32_INT32 <= self <= DType.INT64_INT64

    @property
    def is_complex(self) -> bool:
        """Whether this is a complex type."""
        return self in (DType.COMPLEX64, DType.COMPLEX128)

    def supports(self, op: ReduceOp) -> bool:
        """Whether elements of this type can be reduced so.

        >>> DType.FLOAT32.supports(ReduceOp.AVG), DType.FLOAT32.supports(ReduceOp.BXOR)
        (True, False)
        """
        if self.is_pair or op.is_place:
            return self.is_pair and op.is_place
        if self.is_complex:
            return op in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
        if self.is_float:
            return not (op.is_bitwise or op.is_logical)
        return not (self is DType.BOOL and op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM))


_SIZE_BYTES = (4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1, 8, 16, 1, 1, 8, 16, 8, 16)


class ReduceOp(IntEnum):
    """Reductions. The values are those of `csrc/core/types.h`."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    LAND = 8
    LOR = 9
    LXOR = 10
    PREMUL_SUM = 11
    """A sum of contributions that their ranks have already multiplied."""
    MINLOC = 12
    MAXLOC = 13

    @property
    def is_bitwise(self) -> bool:
        """Whether the bits of integers are combined."""
        return self in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

    @property
    def is_logical(self) -> bool:
        """Whether elements are truth values: true unless 0, with results 0 or 1."""
        return self in (ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR)

    @property
    def is_place(self) -> bool:
        """Whether pairs are compared by value, then by index."""
        return self in (ReduceOp.MINLOC, ReduceOp.MAXLOC)

    @property
    def selects(self) -> bool:
        """Whether a result is one of the contributions, with its bits unchanged."""
        return self in (ReduceOp.MIN, ReduceOp.MAX) or self.is_place


class Op(StrEnum):
    """The collective operations."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"
    SCAN = "scan"
    EXSCAN = "exscan"

    @property
    def reduces(self) -> bool:
        """Whether contributions are combined."""
        return self in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE) or self.scans

    @property
    def scans(self) -> bool:
        """Whether each rank gets the reduction over the ranks below it (scan: and its own)."""
        return self in (Op.SCAN, Op.EXSCAN)

    @property
    def rooted(self) -> bool:
        """Whether one rank is the root."""
        return self in (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)


class LengthsFrom(IntEnum):
    """Which argument says how long pieces are. The values are those of `csrc/core/call.h`."""

    NONE = 0
    COUNTS = 1
    SEND_COUNTS = 2


class SingleCopy(StrEnum):
    """Whether ranks of one host read each other's memory where it is: where that was measured to be
    faster (`bootstrap/single_copy.py`), never, or wherever the kernel lets them."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


class StorePolicy(IntEnum):
    """Cache policy of result stores: through the caches, past them, or chosen by size and cores.

    Values as in `csrc/execution/store_policy.h`. Results have the same bits with each.
    """

    CACHED = 0
    STREAMING = 1
    ADAPTIVE = 2
