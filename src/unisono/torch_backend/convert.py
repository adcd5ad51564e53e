"""Conversion of torch's options and element types, by tables that are built once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist

from unisono.errors import UnsupportedError
from unisono.types import ReduceOp

_RedOpType: Any = dist.ReduceOp.RedOpType

# The hash of a torch ReduceOp is cheap (0.1 us) and equal for equal operations. A comparison, which
# a dict of ReduceOps needs, takes 0.6 us. PREMUL_SUM is absent, since it has a factor: the KeyError
# leads to the general code.
REDUCE_OPS: Final[dict[int, ReduceOp]] = {
    hash(dist.ReduceOp(theirs)): ours
    for theirs, ours in (
        (_RedOpType.SUM, ReduceOp.SUM),
        (_RedOpType.PRODUCT, ReduceOp.PROD),
        (_RedOpType.MIN, ReduceOp.MIN),
        (_RedOpType.MAX, ReduceOp.MAX),
        (_RedOpType.AVG, ReduceOp.AVG),
        (_RedOpType.BAND, ReduceOp.BAND),
        (_RedOpType.BOR, ReduceOp.BOR),
        (_RedOpType.BXOR, ReduceOp.BXOR),
    )
}

# Tensors of other types can still be moved, as bytes.
NATIVE_DTYPES: Final = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of a call without torch's options object. The fields have torch's names."""

    reduceOp: Any = dist.ReduceOp.SUM
    rootRank: int = 0
    asyncOp: bool = True


def reduce_op(op: Any) -> tuple[ReduceOp, Any]:
    """Converts a torch ReduceOp or RedOpType to a `ReduceOp` and the factor of PREMUL_SUM (else
    None).
    """
    # isinstance(op, dist.ReduceOp) is true for both types.
    full: Any = dist.ReduceOp(op) if isinstance(op, _RedOpType) else op
    if full.op == _RedOpType.PREMUL_SUM:
        # before torch 2.13 only the pickled state shows the factor
        factor = full.factor if hasattr(full, "factor") else full.__getstate__()[1]
        if factor is None:
            raise UnsupportedError("PREMUL_SUM needs a factor: ReduceOp.PREMUL_SUM(0.5)")
        return ReduceOp.SUM, factor
    decoded = REDUCE_OPS.get(hash(full))
    if decoded is None:
        raise UnsupportedError(f"the reduction {op} is not supported on this backend")
    return decoded, None


def seconds(timeout: timedelta | float | None) -> float | None:
    """Returns a timeout in seconds; None if torch means 'not given' (None, zero or negative)."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return value if value > 0 else None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a byte view of a tensor, to move elements of a type that is not in
    `NATIVE_DTYPES`.
    """
    if tensor.element_size() == 1:
        return tensor.detach().view(torch.uint8)  # torch allows this view for any strides
    if not tensor.is_contiguous():
        raise UnsupportedError(f"a {tensor.dtype} tensor must be contiguous to be communicated")
    return tensor.detach().view(-1).view(torch.uint8)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a byte view of it if its element type is not in `NATIVE_DTYPES`."""
    return tensor if tensor.dtype in NATIVE_DTYPES else as_bytes(tensor)


def movable_list(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the list, or byte views of its tensors. All tensors of one call have one element
    type.
    """
    if not tensors or tensors[0].dtype in NATIVE_DTYPES:
        return tensors
    return [as_bytes(tensor) for tensor in tensors]


def split_sizes(tensor: torch.Tensor, sizes: list[int], ranks: int) -> list[int]:
    """Returns the number of rows of each rank's share of `tensor`: `sizes`, or equal shares if
    `sizes` is empty. Raises `ValueError` unless the sizes add up to the rows of the tensor.
    """
    rows = tensor.size(0)
    if not sizes:
        share, rest = divmod(rows, ranks)
        if rest:
            raise ValueError(f"expected a multiple of {ranks} rows, one share per rank, not {rows}")
        return [share] * ranks
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(f"expected {ranks} split sizes with the sum {rows}, not {sizes}")
    return list(sizes)


def elements_of(tensor: torch.Tensor, sizes: list[int]) -> list[int]:
    """Returns the number of elements of each share of a tensor that has `sizes` rows for the
    ranks.
    """
    rows = sum(sizes)
    width = tensor.numel() // rows if rows else 0
    return [size * width for size in sizes]
