"""The device work of a call whose kind and addresses have occurred before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.call_agreement import AgreedKind
from unisono.torch_backend.device.call_plan import OwnMove, Span
from unisono.torch_backend.device.peer_device import (
    Address,
    Event,
    Launch,
    PeerDevice,
    Record,
    Wait,
)

NUMBERS = 8
"""Count of the numbers of events of a call: 0 for ready data, the last one for the end."""

_END = NUMBERS - 1

Enqueue = Callable[[int], None]
"""Enqueues the work of a call on the current stream; takes the first number of its events."""


def has_ended(device: PeerDevice, base: int) -> bool:
    """Returns True if the performers have ended the call with this first number."""
    return all(
        device.has_recorded(rank, Event.MOVED, base + _END) for rank in set(device.performers)
    )


def prepare_call(
    device: PeerDevice, rank: int, kind: AgreedKind, offsets: Sequence[tuple[int, int]]
) -> Enqueue:
    """Prepares a rank's work of a call. `offsets`: for each rank, those of its input and output.

    A performer waits until the other ranks' data is ready, makes its moves phase by phase, and
    records their end. The other ranks wait for that end. If one rank performs all moves, nothing
    waits for its own data.
    """
    performers = kind.plan.performers
    others = [each for each in performers if each != rank]
    ready = [] if performers == (rank,) else [Record(Event.READY, 0)]
    ends = [Wait(each, Event.MOVED, _END) for each in others]
    if rank not in performers:
        return device.batch(ready, ends)
    if len(kind.plan.phases) > _END:
        raise UnsupportedError(f"expected a schedule of at most {_END} phases")
    addresses = _Addresses(device, kind, offsets)
    steps: list[tuple[Enqueue | None, list[Launch]]] = []
    waits = [Wait(each, Event.READY, 0) for each in kind.plan.touched]
    records = ready
    for number, phase in enumerate(kind.plan.phases or ((),)):
        if number:
            records = [Record(Event.MOVED, number)]
            waits = [Wait(each, Event.MOVED, number) for each in others]
        flags = device.batch(records, waits) if records or waits else None
        steps.append((flags, [each for move in phase for each in addresses.launches(move)]))
    steps.append((device.batch([Record(Event.MOVED, _END)], ends), []))
    return _in_order(steps)


class _Addresses:
    """The addresses of a call's memory on this rank."""

    def __init__(
        self, device: PeerDevice, kind: AgreedKind, offsets: Sequence[tuple[int, int]]
    ) -> None:
        self._device, self._kind, self._offsets = device, kind, offsets

    def launches(self, move: OwnMove) -> list[Launch]:
        """Returns the prepared work of a move, which may be none."""
        if not move.nbytes:
            return []
        sources = [self._of(span) for span in move.sources]
        targets = [self._of(span) for span in move.targets]
        if len(sources) == 1:  # a call in place leaves some pieces where they are
            targets = [each for each in targets if each != sources[0]]
        if not targets:
            return []
        request, divisor = self._kind.request, len(self._offsets)
        return [
            self._device.prepare(
                targets, sources, move.nbytes, request.dtype, request.reduction, divisor
            )
        ]

    def _of(self, span: Span) -> Address:
        which = int(span.is_output)
        allocation = self._kind.allocations[span.rank][which]
        offset = self._offsets[span.rank][which] + span.offset
        return self._device.address(span.rank, allocation, offset)


def _in_order(steps: Sequence[tuple[Enqueue | None, list[Launch]]]) -> Enqueue:
    def enqueue(base: int) -> None:
        for flags, launches in steps:
            if flags is not None:
                flags(base)
            for launch in launches:
                launch()

    return enqueue
