"""The agreement of all ranks on a kind of call: requests that match, and memory that is open.

A kind of call is the request of each rank, and the allocations of its input and output. Each rank
numbers its own kinds. The ranks agree once on each combination of these numbers, so later calls
exchange only numbers and offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from unisono.communicator import fail_group
from unisono.errors import UnsupportedError
from unisono.torch_backend.device.call_header import (
    DeviceRequest,
    decode,
    encode,
    request_words,
)
from unisono.torch_backend.device.call_plan import CallPlan, plan_call
from unisono.torch_backend.device.peer_device import (
    EXPORT_WORDS,
    MOST_FREED,
    Address,
    PeerDevice,
    Words,
)
from unisono.torch_backend.device.refusals import (
    REFUSAL_WORDS,
    agree,
    refusal_words,
    require_none_refused,
)
from unisono.torch_backend.private import hide_from_dynamo

_MOST_PLANS = 1024
_MEMORY_WORDS = 1 + EXPORT_WORDS  # the allocation's number, and the words to open it


class OwnKind(NamedTuple):
    """This rank's part of a kind of call. Allocation 0 is memory without elements."""

    request: DeviceRequest
    allocations: tuple[int, int]
    """The allocations of the input and of the output."""


@dataclass(frozen=True, slots=True)
class AgreedKind:
    """A kind of call on which all ranks agree."""

    request: DeviceRequest
    plan: CallPlan
    allocations: tuple[tuple[int, int], ...]
    """For each rank, the allocations of its input and of its output."""


class CallAgreement:
    """Makes agreements; each method is collective over the ranks of a communicator."""

    def __init__(self, comm: Any, device: PeerDevice) -> None:
        self._comm, self._device = comm, device
        self._plans: dict[bytes, CallPlan] = {}

    def agree(self, own: OwnKind, problem: Exception | None) -> AgreedKind:
        """Returns the kind of call that the ranks' own kinds form; opens memory that it needs.

        `problem`: the reason why this rank cannot make its call; all ranks then raise
        `UnsupportedError`, and the group stays usable. Raises `MismatchError` for calls that do
        not match, on all ranks.
        """
        rows = self._exchange(own, problem)
        ranks, op = self._comm.size, own.request.op
        require_none_refused(rows[:, -REFUSAL_WORDS:], f"{op} on the device")
        self._close_freed(rows)
        plan = self._plan(rows[:, : request_words(ranks)])
        allocations = tuple(
            (int(memory[0, 0]), int(memory[1, 0])) for memory in map(self._memory, rows)
        )
        agree(self._comm, self._open(own.request, plan, rows), f"{op} on the device")
        return AgreedKind(own.request, plan, allocations)

    def _exchange(self, own: OwnKind, problem: Exception | None) -> Words:
        memory = np.zeros((2, _MEMORY_WORDS), np.int64)
        try:
            for words, allocation in zip(memory, own.allocations, strict=True):
                if allocation and problem is None:
                    words[0], words[1:] = allocation, self._device.export(allocation)
        except UnsupportedError as error:
            problem = error
        freed = np.zeros(MOST_FREED, np.int64)
        gone = self._device.freed()
        freed[: len(gone)] = gone
        request = encode(own.request, self._comm.size)
        parts = request, memory.ravel(), freed, refusal_words(problem)
        header = np.concatenate(parts)
        found: Words = self._comm.all_gather(header)
        return found.reshape(self._comm.size, len(header))

    def _memory(self, row: Words) -> Words:
        start = request_words(self._comm.size)
        return row[start : start + 2 * _MEMORY_WORDS].reshape(2, _MEMORY_WORDS)

    def _close_freed(self, rows: Words) -> None:
        end = rows.shape[1] - REFUSAL_WORDS
        for rank, row in enumerate(rows):
            for allocation in row[end - MOST_FREED : end].tolist():
                if allocation:
                    self._device.release_memory(rank, allocation)

    def _plan(self, requests: Words) -> CallPlan:
        key = requests.tobytes()
        plan = self._plans.get(key)
        if plan is None:
            decoded = [decode(words, self._comm.size) for words in requests]
            try:
                plan = plan_call(decoded, self._device.performers, self._comm.rank)
            except Exception as error:  # all ranks raise the same
                fail_group(self._comm, error)
                raise
            if len(self._plans) >= _MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan
        return plan

    def _open(self, request: DeviceRequest, plan: CallPlan, rows: Words) -> Exception | None:
        """Opens the memory that this rank's moves use, and prepares its reductions. Returns the
        reason if that is impossible."""
        moves = [move for phase in plan.phases for move in phase]
        used = {
            (span.rank, span.is_output) for move in moves for span in (*move.sources, *move.targets)
        }
        try:
            for rank, is_output in used:
                words = self._memory(rows[rank])[int(is_output)]
                if words[0]:
                    self._device.open(rank, int(words[0]), words[1:])
            for move in moves:
                if move.nbytes:
                    self._try(request, len(move.sources), len(move.targets))
        except Exception as error:
            return error
        return None

    def _try(self, request: DeviceRequest, sources: int, targets: int) -> None:
        """Prepares a reduction of as many arrays; raises an error if the device has none."""
        rank = self._comm.rank
        read, written = ([Address(rank, 0)] * count for count in (sources, targets))
        size_bytes = request.dtype.size_bytes
        self._device.prepare(written, read, size_bytes, request.dtype, request.reduction, 1)


hide_from_dynamo(CallAgreement)
