"""Messages between the ranks: messages to rank 0, and the decisions of rank 0.

Every message is a frozen dataclass. `encode` and `decode` convert messages to JSON and back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import Any, TypeAlias

from unisono.controller.fusion.buckets import Bucket
from unisono.controller.fusion.fusion_report import FusionReport
from unisono.controller.fusion.fusion_trial import PassTimes, Trial
from unisono.controller.request import Request
from unisono.errors import UnisonoError

# ---- to rank 0


@dataclass(frozen=True, slots=True)
class Announce:
    """The sender has submitted these tensors. Rank 0 ignores the message if its `epoch` has ended,
    because the plan has then changed.
    """

    epoch: int
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Break:
    """The sender cannot follow the frozen plan of this epoch, for this reason."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The sender has left the frozen plan after it launched this many buckets."""

    epoch: int
    launched: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The sender has launched all passes of the trial of this epoch, and waits for the next plan.

    `times` are the sender's measurements.
    """

    epoch: int
    times: PassTimes


@dataclass(frozen=True, slots=True)
class Join:
    """The sender has no more tensors. `average_over_all`: averages divide by the number of all
    ranks, not of those that have the tensor.
    """

    epoch: int
    average_over_all: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender closes its controller."""


@dataclass(frozen=True, slots=True)
class AskStalls:
    """The sender asks for the tensors that only some ranks have submitted."""


# ---- from rank 0 to all ranks, itself included; each rank receives them in the same order


@dataclass(frozen=True, slots=True)
class Run:
    """All ranks run this bucket now. `active` are the ranks that have the tensors.

    Other ranks contribute neutral values. `lengths` are the rows of each rank in an all_gather.
    """

    bucket: Bucket
    active: tuple[int, ...]
    average_over_all: bool
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """The tensor fails on all ranks, before any data moves."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """All ranks follow this plan, pass after pass, without further messages.

    A `trial` limits the plan to some passes. All ranks then report `Finished`.
    """

    epoch: int
    buckets: tuple[Bucket, ...]
    trial: Trial | None = None


@dataclass(frozen=True, slots=True)
class Tuned:
    """The fusion tuner on rank 0 has made its final decision on the buckets of the next plan."""

    report: FusionReport


@dataclass(frozen=True, slots=True)
class Thaw:
    """All ranks leave the frozen plan and report how many buckets they launched."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """All ranks launch void buckets, which run on no rank, until each has launched this many
    buckets of the old plan. Then they negotiate again.
    """

    epoch: int
    launched: int


@dataclass(frozen=True, slots=True)
class Joined:
    """All ranks have joined. `last` is the last rank that joined."""

    epoch: int
    last: int


@dataclass(frozen=True, slots=True)
class Left:
    """A rank has closed its controller."""

    rank: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """A waiting tensor: the ranks that submitted it, the missing ranks, and the waiting time."""

    name: str
    present: tuple[int, ...]
    missing: tuple[int, ...]
    waited_s: float


@dataclass(frozen=True, slots=True)
class Stalls:
    """The answer to `AskStalls`."""

    stalls: tuple[Stalled, ...]


Message: TypeAlias = (
    Announce
    | Break
    | Stopped
    | Finished
    | Join
    | Leave
    | AskStalls
    | Run
    | Refuse
    | Freeze
    | Tuned
    | Thaw
    | Resume
    | Joined
    | Left
    | Stalls
)


def encode(messages: tuple[Message, ...]) -> bytes:
    """Returns several messages as JSON.

    >>> decode(encode((Left(2), Refuse("w", "no"))))
    (Left(rank=2), Refuse(name='w', text='no'))
    """
    return json.dumps([_fields(message) for message in messages]).encode()


def decode(text: bytes) -> tuple[Message, ...]:
    """Returns the messages of a JSON text from `encode`. Raises `UnisonoError` for other texts."""
    try:
        return tuple(_DECODERS[kind](*fields) for kind, *fields in json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise UnisonoError(
            f"expected messages of a controller, got {text[:60]!r} ({error}): do all ranks run the "
            "same version?"
        ) from error


def _fields(message: Message) -> list[Any]:
    kind = type(message).__name__
    return [kind, *(_plain(getattr(message, name)) for name in type(message).__slots__)]


def _plain(value: Any) -> Any:
    if isinstance(value, Bucket):
        return _plain_requests(value.requests)
    if isinstance(value, Stalled):
        return [value.name, value.present, value.missing, value.waited_s]
    if isinstance(value, PassTimes):
        return astuple(value)
    if isinstance(value, FusionReport):
        return asdict(value)
    if isinstance(value, Trial):
        return [_plain(value.other), value.order, value.details]
    if isinstance(value, tuple):
        if value and isinstance(value[0], Request):
            return _plain_requests(value)
        return [_plain(each) for each in value]
    return value


def _plain_requests(requests: tuple[Request, ...]) -> list[Any]:
    """Encodes requests; a large group is written once, not for each of its tensors."""
    groups = ((), *(request.group for request in requests))
    return [request.encode(before) for request, before in zip(requests, groups, strict=False)]


def _requests(fields: list[Any]) -> tuple[Request, ...]:
    found: list[Request] = []
    for each in fields:
        found.append(Request.decode(each, found[-1].group if found else ()))
    return tuple(found)


def _bucket(fields: list[Any]) -> Bucket:
    return Bucket(_requests(fields))


def _buckets(fields: list[Any]) -> tuple[Bucket, ...]:
    return tuple(map(_bucket, fields))


def _trial(fields: list[Any] | None) -> Trial | None:
    if fields is None:
        return None
    other, order, details = fields
    return Trial(_buckets(other), tuple(order), details)


def _pass_times(fields: list[Any]) -> PassTimes:
    step_ns, ready_ns, bucket_ns = fields
    return PassTimes(tuple(step_ns), tuple(ready_ns), tuple(map(tuple, bucket_ns)))


def _report(fields: dict[str, Any]) -> FusionReport:
    names = tuple(map(tuple, fields["buckets"]))
    sizes = {name: tuple(fields[name]) for name in ("bucket_bytes", "before_bucket_bytes")}
    return FusionReport(**{**fields, **sizes, "buckets": names})


_DECODERS: dict[str, Callable[..., Message]] = {
    "Announce": lambda epoch, requests: Announce(epoch, _requests(requests)),
    "Break": Break,
    "Stopped": Stopped,
    "Finished": lambda epoch, times: Finished(epoch, _pass_times(times)),
    "Join": Join,
    "Leave": Leave,
    "AskStalls": AskStalls,
    "Run": lambda bucket, active, over_all, lengths: Run(
        _bucket(bucket), tuple(active), over_all, tuple(lengths)
    ),
    "Refuse": Refuse,
    "Freeze": lambda epoch, buckets, trial: Freeze(epoch, _buckets(buckets), _trial(trial)),
    "Tuned": lambda report: Tuned(_report(report)),
    "Thaw": Thaw,
    "Resume": Resume,
    "Joined": Joined,
    "Left": Left,
    "Stalls": lambda stalls: Stalls(
        tuple(Stalled(name, tuple(p), tuple(m), waited_s) for name, p, m, waited_s in stalls)
    ),
}
