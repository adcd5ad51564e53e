"""What rank 0 tells the parent process while it trains: one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """All ranks have joined and hold the model."""

    total_steps: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One step is done. Sent a few times a second, not for every step."""

    backend: str
    step: int
    loss: float
    """Of rank 0's own samples: the mean over ranks would cost the step a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A stretch of training is done."""

    backend: str
    period: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Training is done, the measured phase begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The outcome on one backend. See `communication` for what is measured."""

    backend: str
    score: float
    losses: list[float]
    """Mean over ranks, one for each step."""
    step_s: list[float]
    """Wall time of each training step on rank 0."""
    exchange_s: list[float]
    """One exchange of all gradients, alone: the mean of each group; see `communication`."""
    synced_s: list[float]
    """Forward and backward passes with the exchange."""
    unsynced_s: list[float]
    """The same without the exchange, taken in turns with those of `synced_s`."""
    bucket_bytes: list[int]
    """The gradient buckets that DDP exchanges, in its order."""
    same_parameters: bool
    """Whether the trained parameters have the same bits on all ranks."""
    sample: str
    """Text written by the model; empty for a task that writes none."""


Event = Started | Stepped | Scored | Measuring | Finished

_TYPES: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Started, Stepped, Scored, Measuring, Finished)
}


def encode(event: Event) -> str:
    """One line, without its end."""
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def decode(line: str) -> Event:
    """The event of one line. Raises ValueError for a line that is none."""
    fields = json.loads(line)
    try:
        kind = _TYPES[fields.pop("event")]
        return kind(**fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an event: {line!r}") from error
