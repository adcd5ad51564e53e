"""Collectives over device memory that the ranks of one host open in each other's processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono import algorithms
from unisono.communicator import fail_group
from unisono.errors import MismatchError
from unisono.execution import Move, Place, moves_of, part_bytes
from unisono.torch_backend.device.call_header import (
    DeviceRequest,
    call_words,
    decode,
    encode,
    header_words,
    memory_words,
    require_equal_calls,
    require_equal_lengths,
)
from unisono.torch_backend.device.lost_rank_watch import LostRankWatch
from unisono.torch_backend.device.peer_device import Address, Event, PeerDevice, Words
from unisono.torch_backend.private import hide_from_dynamo
from unisono.types import DType, Op

ALGORITHM = "direct"
"""The algorithm of all collectives: over peer memory, each byte moves once."""

_MOST_PLANS = 1024


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a rank's input or output."""

    rank: int
    is_output: bool
    offset: int


@dataclass(frozen=True, slots=True)
class _OwnMove:
    sources: tuple[_Span, ...]
    targets: tuple[_Span, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """The moves of this rank in each phase of a call, and the ranks that have moves."""

    phases: tuple[tuple[_OwnMove, ...], ...]
    performers: tuple[int, ...]
    touched: tuple[int, ...]
    """The ranks whose memory this rank's moves use."""


class PeerMemory:
    """Performs collectives on device memory, with a communicator for headers and order.

    Each call exchanges headers, so all ranks know that all have made it. The performers wait for
    the ranks' events, run the moves of the schedule phase by phase, and record events on which the
    other ranks' streams wait.
    """

    def __init__(self, comm: Any, device: PeerDevice) -> None:
        """`comm`: a communicator of its own for these calls."""
        self._comm, self._device = comm, device
        self._plans: dict[bytes, _Plan] = {}
        self._is_connected = False
        self._watch = LostRankWatch(comm, device, self._release, self._has_ended)
        self._calls = self._phases = 0
        """Number of calls, and of phases after the first ones of calls; equal on all ranks."""

    def run(
        self,
        request: DeviceRequest,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
    ) -> None:
        """Enqueues a collective on the current stream of the calling thread.

        Blocks until all ranks have called it. Raises `MismatchError` if calls do not match, and the
        failures of the communicator.
        """
        comm, device = self._comm, self._device
        self._connect()
        self._calls += 1
        device.record(Event.READY, self._calls)
        headers = self._exchange(encode(request, comm.size, self._export(source, target)))
        try:
            plan = self._plan(headers)
            self._perform_all(plan, headers, request)
        except Exception as error:  # of calls that do not match, all ranks raise the same
            fail_group(comm, error)
            raise
        self._watch.begin()
        comm.barrier()  # then the performers have recorded their events
        for rank in plan.performers:
            if rank != comm.rank:
                device.wait(rank, Event.DONE, self._calls)

    def close(self) -> None:
        """Frees the memory of other ranks that this rank has opened."""
        self._watch.close()
        self._device.close()

    def _has_ended(self) -> bool:
        """Returns True if the device has ended all calls so far."""
        performers = set(self._device.performers)
        return all(self._device.has_recorded(r, Event.DONE, self._calls) for r in performers)

    def _release(self) -> None:
        self._device.release(self._calls)

    def _perform_all(self, plan: _Plan, headers: Words, request: DeviceRequest) -> None:
        device = self._device
        for rank in plan.touched:
            device.wait(rank, Event.READY, self._calls)
        for number, phase in enumerate(plan.phases):
            if number:
                self._next_phase(plan.performers)
            for move in phase:
                self._perform(move, headers, request)
        if self._comm.rank in plan.performers:
            device.record(Event.DONE, self._calls)

    def _export(
        self, source: torch.Tensor | None, target: torch.Tensor | None
    ) -> list[Words | None]:
        """Returns the words of the input and the output; empty tensors need none."""
        first, second = (
            each if each is not None and each.numel() else None for each in (source, target)
        )
        words = None if first is None else self._device.export(first)
        if second is first:
            return [words, words]
        return [words, None if second is None else self._device.export(second)]

    def _connect(self) -> None:
        if not self._is_connected:
            self._device.connect()
            self._is_connected = True

    def _exchange(self, header: Words) -> Words:
        found: Words = self._comm.all_gather(header)
        return found.reshape(self._comm.size, header_words(self._comm.size))

    def _next_phase(self, performers: Sequence[int]) -> None:
        """Makes the stream wait for the end of all performers' moves so far."""
        self._phases += 1
        if self._comm.rank in performers:
            self._device.record(Event.PHASE, self._phases)
        self._comm.barrier()
        for rank in performers:
            if rank != self._comm.rank and self._comm.rank in performers:
                self._device.wait(rank, Event.PHASE, self._phases)

    def _perform(self, move: _OwnMove, headers: Words, request: DeviceRequest) -> None:
        if not move.nbytes:
            return
        sources = [self._address(each, headers) for each in move.sources]
        targets = [self._address(each, headers) for each in move.targets]
        if len(sources) == 1:  # a call in place leaves some pieces where they are
            targets = [each for each in targets if each != sources[0]]
        if targets:
            self._device.fold(
                targets, sources, move.nbytes, request.dtype, request.reduction, self._comm.size
            )

    def _address(self, span: _Span, headers: Words) -> Address:
        words = memory_words(headers[span.rank], self._comm.size, is_output=span.is_output)
        rank, value = self._device.address(span.rank, words)
        return Address(rank, value + span.offset)

    def _plan(self, headers: Words) -> _Plan:
        key = headers[:, call_words(self._comm.size)].tobytes()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
            plan = self._plans[key] = self._make_plan(headers)
        return plan

    def _make_plan(self, headers: Words) -> _Plan:
        ranks = self._comm.size
        requests = [decode(each, ranks) for each in headers]
        require_equal_calls(requests)
        first = requests[0]
        root: dict[str, Any] = {} if first.root is None else {"root": first.root}
        schedule = algorithms.build(first.op, ALGORITHM, ranks=ranks, **root)
        parts = schedule.collective.parts
        phases = []
        for moves in moves_of(schedule, self._device.performers):
            found = [(move, _spans(move, requests, parts)) for move in moves]
            phases.append(tuple(own for move, own in found if move.performer == self._comm.rank))
        own = [
            span for phase in phases for move in phase for span in (*move.sources, *move.targets)
        ]
        used = {self._device.performers[rank] for rank in range(ranks)}
        return _Plan(
            phases=tuple(phases),
            performers=tuple(sorted(used)),
            touched=tuple(sorted({span.rank for span in own} - {self._comm.rank})),
        )


def _spans(move: Move, requests: Sequence[DeviceRequest], parts: int) -> _OwnMove:
    """Returns a move with byte offsets. Raises `MismatchError` for places of different lengths."""
    places = (*move.sources, *move.targets)
    found = [_range(place, requests[place.rank], parts) for place in places]
    source = move.sources[0]
    length = found[0][1]
    for place, (_, nbytes) in zip(places, found, strict=True):
        require_equal_lengths(
            requests, (source.rank, source.piece, length), (place.rank, place.piece, nbytes)
        )
    spans = [
        _Span(place.rank, place.is_output, offset)
        for place, (offset, _) in zip(places, found, strict=True)
    ]
    count = len(move.sources)
    return _OwnMove(tuple(spans[:count]), tuple(spans[count:]), length)


def _range(place: Place, request: DeviceRequest, parts: int) -> tuple[int, int]:
    """Returns the first byte and the number of bytes of a place."""
    pieces = request.outputs if place.is_output else request.inputs
    if place.piece >= len(pieces):
        raise MismatchError(
            f"{request.op}: rank {place.rank} called {request}, which has no "
            f"{'output' if place.is_output else 'input'} piece {place.piece}"
        )
    start = list(itertools.accumulate(pieces, initial=0))[place.piece]
    nbytes = pieces[place.piece]
    each = part_bytes(nbytes, parts, request.dtype)
    first = min(place.part * each, nbytes)
    return start + first, min((place.part + place.parts) * each, nbytes) - first


def barrier_request() -> DeviceRequest:
    """Returns the request of a barrier, which moves no data."""
    return DeviceRequest(op=Op.BARRIER, dtype=DType.UINT8)


hide_from_dynamo(PeerMemory)
