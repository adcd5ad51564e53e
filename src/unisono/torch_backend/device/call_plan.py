"""The moves of a collective with their bytes, from the requests of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono import algorithms
from unisono.errors import MismatchError
from unisono.execution import Move, Place, moves_of, part_bytes
from unisono.torch_backend.device.call_header import (
    DeviceRequest,
    require_equal_calls,
    require_equal_lengths,
)

ALGORITHM = "direct"
"""The algorithm of all collectives: over peer memory, each byte moves once."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a rank's input or output."""

    rank: int
    is_output: bool
    offset: int


@dataclass(frozen=True, slots=True)
class OwnMove:
    """A move that this rank performs."""

    sources: tuple[Span, ...]
    targets: tuple[Span, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """The moves of one rank in each phase of a call, and the ranks that have moves."""

    phases: tuple[tuple[OwnMove, ...], ...]
    performers: tuple[int, ...]
    touched: tuple[int, ...]
    """The other ranks whose memory this rank's moves use."""


def plan_call(requests: Sequence[DeviceRequest], performers: Sequence[int], rank: int) -> CallPlan:
    """Returns the plan of a rank. `performers[r]` issues the moves into the memory of rank r.

    Raises `MismatchError` if the requests do not match; it has the same text on all ranks.
    """
    require_equal_calls(requests)
    first, ranks = requests[0], len(requests)
    root: dict[str, Any] = {} if first.root is None else {"root": first.root}
    schedule = algorithms.build(first.op, ALGORITHM, ranks=ranks, **root)
    parts = schedule.collective.parts
    phases = []
    for moves in moves_of(schedule, performers):
        found = [(move, _spans(move, requests, parts)) for move in moves]
        phases.append(tuple(own for move, own in found if move.performer == rank))
    own = [span for phase in phases for move in phase for span in (*move.sources, *move.targets)]
    return CallPlan(
        phases=tuple(phases),
        performers=tuple(sorted(set(performers))),
        touched=tuple(sorted({span.rank for span in own} - {rank})),
    )


def _spans(move: Move, requests: Sequence[DeviceRequest], parts: int) -> OwnMove:
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
        Span(place.rank, place.is_output, offset)
        for place, (offset, _) in zip(places, found, strict=True)
    ]
    count = len(move.sources)
    return OwnMove(tuple(spans[:count]), tuple(spans[count:]), length)


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
