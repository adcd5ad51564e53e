"""Collectives over device memory that the ranks of one host open in each other's processes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

from unisono.communicator import fail_group
from unisono.errors import UnsupportedError
from unisono.torch_backend.device.call_agreement import AgreedKind, CallAgreement, OwnKind
from unisono.torch_backend.device.call_header import DeviceRequest
from unisono.torch_backend.device.lost_rank_watch import LostRankWatch
from unisono.torch_backend.device.peer_device import PeerDevice
from unisono.torch_backend.device.prepared_call import NUMBERS, Enqueue, has_ended, prepare_call
from unisono.torch_backend.private import hide_from_dynamo

_MOST_CALLS = 4096
"""Most kinds, and prepared calls, that are kept; all ranks drop the same kinds."""

_REFUSED = 0  # instead of the number of a kind
_NUMBERS = struct.Struct("=qqq")  # the number of a kind, the offsets of the input and the output


class PeerMemory:
    """Performs collectives on device memory, with a communicator for headers and order.

    Each rank numbers its kinds of calls: what it asks for, and the allocations that it uses. A call
    exchanges these numbers and the tensors' offsets, so all ranks know that all have made it. If
    the ranks have agreed on these kinds before, each one enqueues its work without further
    messages, from a table of prepared calls.
    """

    def __init__(self, comm: Any, device: PeerDevice, watch: LostRankWatch) -> None:
        """`comm`: a communicator of its own for these calls."""
        self._comm, self._device, self._watch = comm, device, watch
        self._agreement = CallAgreement(comm, device)
        self._kinds: dict[OwnKind, int] = {}
        self._last_kind = _REFUSED
        self._agreed: dict[bytes, AgreedKind] = {}
        self._calls: dict[bytes, Enqueue] = {}
        self._header = bytearray(_NUMBERS.size)
        self._own = np.frombuffer(self._header, np.int64)
        self._all = np.zeros(len(self._own) * comm.size, np.int64)
        self._number = 0
        watch.follow(lambda: not self._number or has_ended(device, self._number))

    def run(
        self,
        request: DeviceRequest,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
    ) -> None:
        """Enqueues a collective on the current stream of the calling thread.

        Blocks until all ranks have called it. Raises `MismatchError` if calls do not match,
        `UnsupportedError` on all ranks if one cannot share its memory, and the failures of the
        communicator.
        """
        problem: Exception | None = None
        try:
            kind, offsets = self._describe(request, source, target)
            number = self._kinds.get(kind) or self._new_number(kind)
        except UnsupportedError as error:
            kind, offsets, number, problem = OwnKind(request, (0, 0)), (0, 0), _REFUSED, error
        _NUMBERS.pack_into(self._header, 0, number, *offsets)
        self._comm.all_gather(self._own, self._all)
        call: Any = self._calls.get(self._all.tobytes())
        agreed = self._agreed_kind(kind, problem) if call is None else None
        self._number += NUMBERS
        try:
            if agreed is not None:
                call = self._prepare(agreed)
            call(self._number)
        except Exception as error:
            fail_group(self._comm, error)
            raise
        self._watch.begin()

    def close(self) -> None:
        """Frees the memory of other ranks that this rank has opened."""
        self._watch.close()
        self._device.close()

    def _describe(
        self, request: DeviceRequest, source: torch.Tensor | None, target: torch.Tensor | None
    ) -> tuple[OwnKind, tuple[int, int]]:
        """Returns the kind of this rank's call, and the offsets of the input and the output."""
        locate = self._device.locate
        first, start = (0, 0) if source is None else locate(source)
        if target is source:
            return OwnKind(request, (first, first)), (start, start)
        second, end = (0, 0) if target is None else locate(target)
        return OwnKind(request, (first, second)), (start, end)

    def _new_number(self, kind: OwnKind) -> int:
        _limit(self._kinds)
        self._last_kind += 1
        self._kinds[kind] = self._last_kind
        return self._last_kind

    def _agreed_kind(self, kind: OwnKind, problem: Exception | None) -> AgreedKind:
        """Returns the kind of the call whose header all ranks have sent. All ranks take the same
        branch."""
        key = self._all.reshape(self._comm.size, -1)[:, 0].tobytes()
        agreed = self._agreed.get(key)
        if agreed is None:
            agreed = self._agreement.agree(kind, problem)
            _limit(self._agreed)
            self._agreed[key] = agreed
        return agreed

    def _prepare(self, kind: AgreedKind) -> Enqueue:
        rows = self._all.reshape(self._comm.size, -1).tolist()
        offsets = [(source, target) for _, source, target in rows]
        _limit(self._calls)
        call = prepare_call(self._device, self._comm.rank, kind, offsets)
        self._calls[self._all.tobytes()] = call
        return call


def _limit(table: dict[Any, Any]) -> None:
    """Makes room for an entry in a table: drops the oldest one."""
    if len(table) >= _MOST_CALLS:
        del table[next(iter(table))]


hide_from_dynamo(PeerMemory)
