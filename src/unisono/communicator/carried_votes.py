"""Votes that are one more element after the data of a small all_reduce.

A separate vote takes as long as the small all_reduce itself. So the vote is an element of the
all_reduce. A rank that is ready sets this element to the agreement: a value that the reduction
returns if all ranks set it. A rank that is not ready sets the element to another value, the
objection. Then no array changes on any rank.
"""

from __future__ import annotations

import numpy as np

from unisono.types import DType, ReduceOp

MOST_BYTES = 1024
"""Most bytes of data that carry a vote. A void call sends the data although no rank uses the
result. In a call with more data, a separate vote takes only a small part of the time."""

_AGREEMENT_0 = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR)
_AGREEMENT_1 = (ReduceOp.MIN, ReduceOp.PROD, ReduceOp.BAND)
_INTEGERS = (DType.INT16, DType.UINT16, DType.INT32, DType.UINT32, DType.INT64, DType.UINT64)


def can_carry(dtype: DType, reduction: ReduceOp, nbytes: int) -> bool:
    """Returns True if an all_reduce of `nbytes` bytes can carry its vote.

    Elements of 8 bits cannot carry a vote: the sum of 256 objections would be 0, the agreement.

    >>> can_carry(DType.FLOAT32, ReduceOp.SUM, 8), can_carry(DType.INT8, ReduceOp.SUM, 8)
    (True, False)
    """
    if nbytes > MOST_BYTES or dtype.is_float8:
        return False
    if dtype.is_float and reduction is ReduceOp.AVG:
        return True  # not for integers, whose average would round an objection to 0
    return (dtype.is_float or dtype in _INTEGERS) and reduction in _AGREEMENT_0 + _AGREEMENT_1


def vote_elements(dtype: DType, reduction: ReduceOp) -> tuple[bytes, bytes]:
    """Returns the agreement and the objection, as the bytes of one element each.

    >>> vote_elements(DType.INT16, ReduceOp.MIN)
    (b'\\x01\\x00', b'\\x00\\x00')
    """
    zero, one = (_bytes_of(value, dtype) for value in (0, 1))
    return (one, zero) if reduction in _AGREEMENT_1 else (zero, one)


def _bytes_of(value: int, dtype: DType) -> bytes:
    if dtype is DType.BFLOAT16:  # the upper half of a float32
        return np.float32(value).tobytes()[2:]
    return np.array(value, dtype.name.lower()).tobytes()
