"""What a simulation assumes beyond the network: endpoints, faults, other traffic, order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from unisono.simulator.link_model import LinkModel


class Order(IntEnum):
    """When a rank's messages leave, beyond waiting for the values that they carry."""

    NONE = 0
    """As soon as the values are there."""
    PROGRAM = 1
    """In each channel one after the other, as the schedule lists them: one begins when the one
    before has left."""
    ROUNDS = 2
    """Those of a round when all that the rank sends and receives in earlier ones has arrived."""
    STREAMS = 3
    """Those from one rank to another, as on one connection: by their rounds, to which a job adds
    its `first_round`; one begins when the one before has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What a rank itself takes. By default nothing: links are the only cost.

    Raises `ValueError` for what is negative, or a rate of 0.

    >>> Endpoint(overhead_s=2e-6, send_Bps=25e9).reduce_Bps
    inf
    """

    overhead_s: float = 0.0
    """Before each message leaves; several can be under way at once (a latency)."""
    busy_s: float = 0.0
    """The sender's time for each message, one message after the other (a message rate)."""
    send_Bps: float = inf
    """Of all messages that the rank sends, together: its network card, or its copy engine."""
    receive_Bps: float = inf
    reduce_Bps: float = inf
    """Bytes of others that the rank adds to its own in a second."""
    enters_s: float = 0.0
    """When the rank begins: a straggler comes late."""
    slowdown: float = 1.0
    """How many times as long as others the rank computes."""

    def __post_init__(self) -> None:
        for name in ("overhead_s", "busy_s", "enters_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"endpoint: {name} is a time, not {getattr(self, name)}")
        for name in ("send_Bps", "receive_Bps", "reduce_Bps", "slowdown"):
            if not getattr(self, name) > 0:
                raise ValueError(f"endpoint: {name} is positive, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Somebody else's steady stream from one rank's place to another's: as much as its fair share,
    at most `rate_Bps`."""

    src: int
    dst: int
    rate_Bps: float = inf

    def __post_init__(self) -> None:
        if not self.rate_Bps > 0:
            raise ValueError(f"traffic: rate_Bps is positive, not {self.rate_Bps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Everything that is not the schedule and not the network as it was built.

    >>> late = Conditions(endpoints={3: Endpoint(enters_s=1e-3)})
    >>> late.endpoint_of(3).enters_s, late.endpoint_of(0).enters_s
    (0.001, 0.0)
    """

    endpoint: Endpoint = field(default_factory=Endpoint)
    """Of every rank that `endpoints` does not name."""
    endpoints: Mapping[int, Endpoint] = field(default_factory=dict)
    failed: tuple[int, ...] = ()
    """Links that are gone: messages take other ways."""
    degraded: Mapping[int, float] = field(default_factory=dict)
    """Links that are slow, and the part of their bandwidth that is left."""
    traffic: tuple[Traffic, ...] = ()
    order: Order = Order.NONE
    in_network: bool = False
    """Whether switches that can (`Nodes.reduces`) add up what many send to one, and copy what one
    sends to many."""
    paths: int = 1
    """Over how many ways of the network's choice each message is spread evenly; 1: a flow keeps to
    one, as ECMP has it."""
    seed: int = 0
    """Of the choice among equal ways."""
    messages: LinkModel | None = None
    """What was measured of messages: links of ranks take its rate, others keep their part of that,
    a message waits what its size has to, and occupies links for the rest of its time. Latencies of
    links are in it. Bytes in results are what occupied links could have carried."""

    def __post_init__(self) -> None:
        if self.paths < 1:
            raise ValueError(f"conditions: paths is at least 1, not {self.paths}")
        if self.messages is not None and self.in_network:
            raise ValueError("conditions: a link model does not tell what switches add up or copy")
        for link, part in self.degraded.items():
            if not 0 < part <= 1:
                raise ValueError(
                    f"conditions: link {link} has {part} of its bandwidth left; that is a part up "
                    "to 1, and a link without any is one that failed"
                )

    def endpoint_of(self, rank: int) -> Endpoint:
        """The endpoint of a rank."""
        return self.endpoints.get(rank, self.endpoint)
