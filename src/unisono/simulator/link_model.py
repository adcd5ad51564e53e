"""Time of a message between two ranks as a function of its size, with one line per range of
sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np

from unisono.algorithms import cost
from unisono.topology import Floats, Ints, Topology
from unisono.types import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A range of sizes from `least` bytes on, in which a message of s bytes takes `alpha_s + s *
    byte_s` seconds."""

    least: float
    alpha_s: float
    byte_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """Time of one message, derived from measurements of an operation.

    The operation `op` was measured on `ranks` ranks and is assumed to run `algorithm`. The size of
    a message is the number of bytes that the busiest rank sends in one round. `error` is the median
    of the fit's relative errors. Raises `ValueError` for regimes that do not increase from 0 bytes,
    and for a last regime without a rate.

    >>> eager, bulk = (Regime(least=0, alpha_s=2e-6, byte_s=0), Regime(least=8e3, alpha_s=4e-6,
    ...     byte_s=1e-10))
    >>> model = LinkModel(regimes=(eager, bulk), op="all_reduce", ranks=2, algorithm="ring")
    >>> float(model.at(1e3)), round(float(model.at(1e6)), 6), round(model.bandwidth_Bps / 1e9)
    (2e-06, 0.000104, 10)
    """

    regimes: tuple[Regime, ...]
    op: str
    ranks: int
    algorithm: str
    error: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        leasts = [regime.least for regime in self.regimes]
        if not leasts or leasts[0] != 0 or leasts != sorted(set(leasts)):
            raise ValueError(
                f"link model: regimes must begin at 0 bytes and increase, got {leasts}"
            )
        if any(not 0 <= r.byte_s < inf or not -inf < r.alpha_s < inf for r in self.regimes):
            raise ValueError(
                "link model: byte_s must be at least 0, and all numbers must be finite"
            )
        if self.regimes[0].alpha_s < 0 or self.regimes[-1].byte_s == 0:
            raise ValueError(
                "link model: the first alpha_s must be at least 0, and the last byte_s above 0"
            )

    def regime_of(self, nbytes: Floats | float) -> Ints:
        """Returns the index of the regime of each size."""
        leasts = [regime.least for regime in self.regimes]
        return np.searchsorted(leasts, np.asarray(nbytes), side="right").astype(np.int64) - 1

    def at(self, nbytes: Floats | float) -> Floats:
        """Returns the seconds that messages of these sizes take without other traffic."""
        which = self.regime_of(nbytes)
        alpha, byte = (self._column(name)[which] for name in ("alpha_s", "byte_s"))
        return np.asarray(alpha + np.asarray(nbytes) * byte, np.float64)

    @property
    def bandwidth_Bps(self) -> float:
        """Bandwidth of the largest messages (the last regime), in bytes per second."""
        return 1.0 / self.regimes[-1].byte_s

    @property
    def delays_s(self) -> Floats:
        """Seconds that a message of each regime waits before it occupies links: `alpha_s`, or 0 if
        `alpha_s` is negative. `alpha_s` can be negative for messages that do not fit into a
        cache."""
        return np.maximum(self._column("alpha_s"), 0.0)

    def load(self, nbytes: Floats) -> Floats:
        """Returns the bytes that a link of `bandwidth_Bps` carries in the time of each message,
        without the message's delay."""
        left = self.at(nbytes) - self.delays_s[self.regime_of(nbytes)]
        return np.maximum(left, 0.0) * self.bandwidth_Bps

    def lightest(self, nbytes: float) -> float:
        """Returns the smallest ratio of `load` to size among messages of up to `nbytes`. The ratio
        is below 1 if small messages have a higher rate than large messages, for example because
        small messages fit into a cache."""
        line = [regime for regime in self.regimes if regime.least <= nbytes]
        parts = [r.byte_s + min(r.alpha_s, 0.0) / max(r.least, 1.0) for r in line]
        return max(0.0, min(parts)) * self.bandwidth_Bps

    def network(self, topology: Topology) -> Topology:
        """Returns a network with the measured bandwidth. All links' bandwidths are multiplied by
        one factor, so that the fastest link of any rank gets the model's bandwidth. Latencies
        become 0, because the model contains them.

        >>> from unisono import topology
        >>> line = Regime(least=0, alpha_s=1e-6, byte_s=1e-9)
        >>> model = LinkModel(regimes=(line,), op="all_reduce", ranks=2, algorithm="ring")
        >>> round(model.network(topology.ring(4)).links.bandwidth_Bps[0])
        1000000000
        """
        rate = topology.links.bandwidth_Bps
        own = rate[topology.links.src < topology.num_ranks].max(initial=0.0)
        faster = self.bandwidth_Bps / own if own else 1.0
        return topology.with_links(bandwidth_Bps=rate * faster, latency_s=0.0)

    def predict(
        self,
        nbytes: float,
        *,
        ranks: int | None = None,
        op: Op | str | None = None,
        algorithm: str | None = None,
    ) -> float:
        """Returns the seconds of an operation of `nbytes` on a network without contention. The
        defaults of `ranks`, `op` and `algorithm` are those of the measurement. Raises
        `UnsupportedError` as `algorithms.cost` does.

        >>> line = Regime(least=0, alpha_s=1e-6, byte_s=1e-9)
        >>> model = LinkModel(regimes=(line,), op="all_reduce", ranks=2, algorithm="ring")
        >>> round(model.predict(1e6, ranks=4) * 1e6)  # 6 rounds of 1/4 of the bytes
        1506
        """
        rounds, share = message(op or self.op, algorithm or self.algorithm, ranks or self.ranks)
        return rounds * float(self.at(share * nbytes))

    def _column(self, name: str) -> Floats:
        return np.array([getattr(regime, name) for regime in self.regimes], np.float64)


def message(op: Op | str, algorithm: str, ranks: int) -> tuple[int, float]:
    """Returns an algorithm's number of rounds, and the fraction of the operation's bytes that the
    busiest rank sends per round."""
    found = cost(op, algorithm, ranks=ranks)
    rounds = max(1, found.rounds)
    return rounds, float(found.bytes_sent) / rounds


def nearest(models: Sequence[LinkModel], op: Op | str, ranks: int) -> LinkModel:
    """Returns the model whose measurement is most similar, first by operation, then by number of
    ranks.

    Raises `ValueError` if `models` is empty.

    >>> flat = Regime(least=0, alpha_s=1e-6, byte_s=1e-9)
    >>> models = [
    ...     LinkModel(op="broadcast", ranks=ranks, regimes=(flat,), algorithm="chain")
    ...     for ranks in (2, 16)
    ... ]
    >>> nearest(models, "broadcast", 12).ranks
    16
    """
    if not models:
        raise ValueError("no link models given; calibrate makes them from measurements")
    return min(models, key=lambda m: (m.op != str(op), abs(log(m.ranks / max(1, ranks)))))
