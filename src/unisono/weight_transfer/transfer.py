"""The transfer of all arrays in a group of the sender and its workers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unisono.communicator import Communicator
from unisono.weight_transfer.array_bytes import ArrayBytes
from unisono.weight_transfer.manifest import Entry, Manifest

SENDER = 0
"""The rank of the sender."""


def transfer(comm: Communicator, manifest: Manifest, arrays: Mapping[str, ArrayBytes]) -> None:
    """Sends the arrays of rank 0 to all ranks. Collective.

    Returns on a rank when all ranks have all arrays. Raises the errors of the communicator.
    """
    for bucket in manifest.buckets():
        if len(bucket) == 1:
            _broadcast(comm, arrays[bucket[0].name].content)
        else:
            _broadcast_together(comm, bucket, arrays)
    comm.barrier()
    if comm.rank != SENDER:
        for each in arrays.values():
            if each.write_back is not None:
                each.write_back()


def _broadcast_together(
    comm: Communicator, bucket: list[Entry], arrays: Mapping[str, ArrayBytes]
) -> None:
    contents = [arrays[each.name].content for each in bucket]
    if comm.rank == SENDER:
        _broadcast(comm, np.concatenate(contents))
        return
    packed = np.empty(sum(each.size for each in contents), np.uint8)
    _broadcast(comm, packed)
    end = 0
    for each in contents:
        begin, end = end, end + each.size
        each[:] = packed[begin:end]


def _broadcast(comm: Communicator, content: np.ndarray) -> None:
    if content.size:
        comm.broadcast(content, root=SENDER)
