"""A short number that two batches rarely share."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import torch

_MOST_WORDS = 2**20  # more are not read, so that the time stays far below that of a forward pass
_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def batch_fingerprint(batch: Sequence[torch.Tensor]) -> int:
    """Returns 32 bits from the shapes, types and bytes of tensors, equal for equal bytes.

    Reads each byte of tensors up to 2^20 elements; of larger ones, evenly spaced samples. Bytes are
    compared, so values that are NaN do not matter. Samples in another order have another
    fingerprint.
    """
    found = 0
    for each in batch:
        found = zlib.crc32(repr((tuple(each.shape), each.dtype)).encode(), found)
        if each.layout == torch.strided and each.numel():
            found = zlib.crc32(struct.pack("2q", *_sums(each.detach())), found)
    return found


def _sums(x: torch.Tensor) -> tuple[int, int]:
    """Returns the sum of a tensor's words, and the sum with the number of the sample as a factor.

    A multiplication by odd numbers loses no bits. Sums wrap around, as integers of torch do.
    """
    if x.is_complex():
        x = torch.view_as_real(x)
    spacing = -(-x.numel() // _MOST_WORDS)
    words = (x[::spacing] if x.dim() else x.view(1)).view(_TYPES[x.element_size()])
    if words.dtype == torch.int32 and words.is_contiguous() and words.shape[-1] % 2 == 0:
        words = words.view(torch.int64) if words.storage_offset() % 2 == 0 else words  # is faster
    rows = (
        words.sum(dim=tuple(range(1, words.dim())), dtype=torch.int64) if words.dim() > 1 else words
    )
    places = torch.arange(1, 2 * len(rows), 2)
    return int(rows.sum(dtype=torch.int64)), int((rows * places).sum())
