"""The vocabulary that every layer shares: element types, reductions, operations."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class DType(IntEnum):
    """Element types. The values are those of `csrc/types.h`."""

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

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return _SIZE_BYTES[self]

    @property
    def is_narrow_float(self) -> bool:
        """Whether sums of this type accumulate in float32 and are rounded once."""
        return self in (DType.FLOAT16, DType.BFLOAT16)

    @property
    def is_float(self) -> bool:
        """Whether this is a real floating-point type."""
        return self in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)

    @property
    def is_complex(self) -> bool:
        """Whether this is a complex type."""
        return self in (DType.COMPLEX64, DType.COMPLEX128)

    def supports(self, op: ReduceOp) -> bool:
        """Whether elements of this type can be reduced so.

        >>> DType.FLOAT32.supports(ReduceOp.AVG), DType.FLOAT32.supports(ReduceOp.BXOR)
        (True, False)
        """
        if self.is_complex:
            return op in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG)
        if self.is_float:
            return op not in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
        return not (self is DType.BOOL and op is ReduceOp.AVG)


_SIZE_BYTES = (4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1, 8, 16)


class ReduceOp(IntEnum):
    """Reductions. The values are those of `csrc/types.h`."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4
    BAND = 5
    BOR = 6
    BXOR = 7


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

    @property
    def reduces(self) -> bool:
        """Whether contributions are combined."""
        return self in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)

    @property
    def rooted(self) -> bool:
        """Whether one rank is the root."""
        return self in (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)


class StorePolicy(IntEnum):
    """How results are stored: through the caches, past them, or by size and by the distance of the
    cores. The values are those of `csrc/stores.h`; the bits of a result do not depend on it."""

    CACHED = 0
    STREAMING = 1
    ADAPTIVE = 2
