"""Types that all modules share: element types, reductions and operations."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class DType(IntEnum):
    """Element types. The values equal those in `csrc/core/types.h`."""

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
    # Pairs of a value and an index of the same size, the elements of MINLOC and MAXLOC.
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
        """True for 8-bit floats of the OCP specification, the same types as in torch."""
        return self in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)

    @property
    def is_narrow_float(self) -> bool:
        """True if sums of this type accumulate in float32 and are rounded once."""
        return self in (DType.FLOAT16, DType.BFLOAT16) or self.is_float8

    @property
    def is_float(self) -> bool:
        """True for a real floating-point type."""
        return self in (DType.FLOAT32, DType.FLOAT64) or self.is_narrow_float

    @property
    def is_pair(self) -> bool:
        """True if an element is a value and an index."""
        return DType.FLOAT32_INT32 <= self <= DType.INT64_INT64

    @property
    def is_complex(self) -> bool:
        """True for a complex type."""
        return self in (DType.COMPLEX64, DType.COMPLEX128)

    def supports(self, op: ReduceOp) -> bool:
        """Returns True if this reduction can combine elements of this type.

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
    """Reductions. The values equal those in `csrc/core/types.h`."""

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
    """A sum of contributions that each rank has already multiplied by a factor."""
    MINLOC = 12
    MAXLOC = 13

    @property
    def is_bitwise(self) -> bool:
        """True if the reduction combines integers bit by bit."""
        return self in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

    @property
    def is_logical(self) -> bool:
        """True if elements are truth values: 0 is false, all else is true; results are 0 or 1."""
        return self in (ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR)

    @property
    def is_place(self) -> bool:
        """True for MINLOC and MAXLOC, which compare pairs by value, then by index."""
        return self in (ReduceOp.MINLOC, ReduceOp.MAXLOC)

    @property
    def selects(self) -> bool:
        """True if a result is one of the contributions, with its bits unchanged."""
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
        """True if the operation combines contributions."""
        return self in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE) or self.scans

    @property
    def scans(self) -> bool:
        """True if each rank receives the reduction over all lower ranks. SCAN includes the rank
        itself.
        """
        return self in (Op.SCAN, Op.EXSCAN)

    @property
    def rooted(self) -> bool:
        """True if one rank is the root."""
        return self in (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)


class LengthsFrom(IntEnum):
    """The argument of a call that states how many elements each rank sends or receives.

    The values equal those in `csrc/core/call.h`.
    """

    NONE = 0
    COUNTS = 1
    SEND_COUNTS = 2


class SingleCopy(StrEnum):
    """Policy for single copy: a rank reads directly from the memory of a rank on the same host.

    AUTO uses single copy where measurements found it faster (`bootstrap/single_copy.py`). ALWAYS
    uses it wherever the kernel permits.
    """

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


class StorePolicy(IntEnum):
    """Cache policy for storing results: cached, streaming (non-temporal), or chosen by size and
    cores.

    The values equal those in `csrc/execution/store_policy.h`. All policies give identical results.
    """

    CACHED = 0
    STREAMING = 1
    ADAPTIVE = 2
