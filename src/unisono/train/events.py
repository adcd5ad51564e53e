"""Events that rank 0 sends to the parent process during training: one JSON object per line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The event that all ranks have joined and have the model."""

    total_steps: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The event that a step has ended, sent a few times a second and not for every step."""

    backend: str
    step: int
    loss: float
    """Loss of rank 0's own samples; the mean over ranks would need a collective in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The event that a training period has ended and the model has been scored."""

    backend: str
    period: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """The event that the training has ended and the measurements begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFinished:
    """The event with the results of one backend. See `communication` for the measurements."""

    backend: str
    score: float
    losses: list[float]
    """Loss of each step, as the mean over ranks."""
    step_s: list[float]
    """Wall time of each training step on rank 0."""
    exchange_s: list[float]
    """Seconds of one exchange of all gradients without computation. Each value is the mean of one
    group of exchanges."""
    synced_s: list[float]
    """Seconds of each forward and backward pass with the exchange of gradients."""
    unsynced_s: list[float]
    """Seconds of the same passes without the exchange, which alternate with those of `synced_s`."""
    bucket_bytes: list[int]
    """Bytes of each of DDP's gradient buckets, in DDP's order."""
    same_parameters: bool
    """True if the trained parameters have the same bits on all ranks."""
    sample: str
    """Text that the model generates; empty for a task without text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFinished:
    """The event with the result of a run of one layout, as the command writes it to `--json`."""

    result: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The event that the layout cannot divide the task, with the reason in one line."""

    reason: str


Event = Started | Stepped | Scored | Measuring | BackendFinished | LayoutFinished | Refused

_TYPES: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (Started, Stepped, Scored, Measuring, BackendFinished, LayoutFinished, Refused)
}


def encode(event: Event) -> str:
    """Returns the event as one line, without the newline."""
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def decode(line: str) -> Event:
    """Returns the event that a line encodes. Raises ValueError if the line is not an event."""
    fields = json.loads(line)
    try:
        kind = _TYPES[fields.pop("event")]
        return kind(**fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an event: {line!r}") from error
