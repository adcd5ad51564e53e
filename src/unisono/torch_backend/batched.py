"""Messages of one `dist.batch_isend_irecv` on another device, passed to its backend as one batch.

NCCL needs one batch: a send that begins alone waits for the other rank's receive, and that receive
begins only after the other rank's own send. Torch coalesces batches only for groups of exactly its
own class. For other groups, this module starts coalescing at the first message of a batch and ends
it at the last message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.torch_backend.private import batch_under_way, coalesces, hide_from_dynamo


class Batched:
    """Sends and receives of a process group, with detection of torch's batches."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._batch: object = None
        self._left = 0

    def call(self, name: str, device: torch.device, *args: Any, **options: Any) -> Any:
        """Sends or receives a message. The last message of a batch returns the work of the whole
        batch.

        The other messages return None, which torch drops from its results.
        """
        message: Callable[..., Any] = getattr(self._group, name)
        found = batch_under_way() if coalesces(self._group, device) else None
        if found is None:
            return message(*args, **options)
        batch, operations = found
        if batch is not self._batch:
            if self._batch is not None:  # still open, since torch refused one of its messages
                self._end(device)
            self._group._start_coalescing(device)
            self._batch = batch
            self._left = sum(one.tensor.device.type == device.type for one in operations)
        self._left -= 1
        try:
            message(*args, **options)
        except BaseException:
            self._end(device)
            raise
        return None if self._left else self._end(device)

    def _end(self, device: torch.device) -> Any:
        self._batch = None
        return self._group._end_coalescing(device)


hide_from_dynamo(Batched)
