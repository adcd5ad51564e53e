"""Conditions of a simulation beyond the network: endpoints, faults, other traffic, send order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from unisono.simulator.link_model import LinkModel


class Order(IntEnum):
    """Order in which a rank sends the messages whose values are available."""

    NONE = 0
    """A rank sends every message as soon as its values are available."""
    PROGRAM = 1
    """Each channel sends in the order of the schedule. A message starts when the previous message
    has left."""
    ROUNDS = 2
    """A message starts when everything that the rank sends and receives in earlier rounds has
    arrived."""
    STREAMS = 3
    """Messages between two ranks are sent in the order of rounds, as on one connection. A message
    starts when the previous message has left. `Job.first_round` is added to the rounds of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Times and rates of the rank itself, in addition to the times of links. By default, only links
    take time.

    Raises `ValueError` for a negative time, and for a rate that is not positive.

    >>> Endpoint(overhead_s=2e-6, send_Bps=25e9).reduce_Bps
    inf
    """

    overhead_s: float = 0.0
    """Seconds before each message leaves; the delays of several messages may overlap (a
    latency)."""
    busy_s: float = 0.0
    """Seconds that the sender needs for each message. The sender processes one message at a time,
    which limits its message rate."""
    send_Bps: float = inf
    """Total rate at which the rank sends: the rate of its network card or copy engine."""
    receive_Bps: float = inf
    reduce_Bps: float = inf
    """Bytes per second at which the rank reduces received bytes into its own buffer."""
    enters_s: float = 0.0
    """Time at which the rank starts; above 0 for a straggler."""
    slowdown: float = 1.0
    """Factor by which this rank's computations take longer."""

    def __post_init__(self) -> None:
        for name in ("overhead_s", "busy_s", "enters_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(
                    f"endpoint: {name} must be a finite time of at least 0, got "
                    f"{getattr(self, name)}"
                )
        for name in ("send_Bps", "receive_Bps", "reduce_Bps", "slowdown"):
            if not getattr(self, name) > 0:
                raise ValueError(f"endpoint: {name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A constant stream of unrelated traffic between two ranks. The stream gets its fair share of
    each link, at most `rate_Bps`."""

    src: int
    dst: int
    rate_Bps: float = inf

    def __post_init__(self) -> None:
        if not self.rate_Bps > 0:
            raise ValueError(f"traffic: rate_Bps must be positive, got {self.rate_Bps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Everything that a simulation assumes besides the schedule and the intact network.

    >>> late = Conditions(endpoints={3: Endpoint(enters_s=1e-3)})
    >>> late.endpoint_of(3).enters_s, late.endpoint_of(0).enters_s
    (0.001, 0.0)
    """

    endpoint: Endpoint = field(default_factory=Endpoint)
    """The endpoint of every rank that `endpoints` does not name."""
    endpoints: Mapping[int, Endpoint] = field(default_factory=dict)
    failed: tuple[int, ...] = ()
    """Failed links; routing avoids them."""
    degraded: Mapping[int, float] = field(default_factory=dict)
    """Slow links, with the remaining fraction of each link's bandwidth."""
    traffic: tuple[Traffic, ...] = ()
    order: Order = Order.NONE
    in_network: bool = False
    """True if capable switches (`Nodes.reduces`) reduce messages to one destination and multicast
    messages from one source."""
    paths: int = 1
    """Number of paths over which the network spreads each message evenly. With 1, each flow uses
    one path, as with ECMP."""
    seed: int = 0
    """Seed of the hash that chooses among equal paths."""
    messages: LinkModel | None = None
    """A measured model of the time of a message. All links' bandwidths are multiplied by one
    factor, so that the fastest link of any rank gets the model's bandwidth. A message first waits
    for the delay that the model has for its size, then occupies links for the rest of its time. The
    delay includes the latencies of links. Bytes in results are the bytes that the occupied links
    could have carried."""

    def __post_init__(self) -> None:
        if self.paths < 1:
            raise ValueError(f"conditions: paths must be at least 1, got {self.paths}")
        if self.messages is not None and self.in_network:
            raise ValueError(
                "conditions: a link model does not describe switches that reduce or copy; "
                "set only one of messages and in_network"
            )
        for link, part in self.degraded.items():
            if not 0 < part <= 1:
                raise ValueError(
                    f"conditions: the remaining bandwidth of link {link} must be above 0 "
                    f"and at most 1, got {part}; list a link without bandwidth in failed"
                )

    def endpoint_of(self, rank: int) -> Endpoint:
        """Returns the endpoint of a rank."""
        return self.endpoints.get(rank, self.endpoint)
