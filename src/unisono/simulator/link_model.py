"""What a message takes between two ranks, by its size: straight lines, each up to a switch."""

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
    """From `least` bytes on a message of s bytes takes `alpha_s + s * byte_s` seconds."""

    least: float
    alpha_s: float
    byte_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """What measurements of an operation say of one message.

    `op` was measured on `ranks` ranks and is taken to run `algorithm`: in each of its rounds the
    busiest rank sends so many bytes, which are the message. `error` is the median of the fit's
    relative errors. Raises `ValueError` for regimes that do not go up from 0 bytes, or that have no
    rate at the end.

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
            raise ValueError(f"link model: regimes begin at 0 bytes and go up, not at {leasts}")
        if any(not 0 <= r.byte_s < inf or not -inf < r.alpha_s < inf for r in self.regimes):
            raise ValueError("link model: byte_s is not negative, and all numbers are finite")
        if self.regimes[0].alpha_s < 0 or self.regimes[-1].byte_s == 0:
            raise ValueError(
                "link model: the first alpha_s is not negative, the last byte_s above 0"
            )

    def regime_of(self, nbytes: Floats | float) -> Ints:
        """Which regime messages of these sizes are in."""
        leasts = [regime.least for regime in self.regimes]
        return np.searchsorted(leasts, np.asarray(nbytes), side="right").astype(np.int64) - 1

    def at(self, nbytes: Floats | float) -> Floats:
        """Seconds of messages of these sizes, alone on their way."""
        which = self.regime_of(nbytes)
        alpha, byte = (self._column(name)[which] for name in ("alpha_s", "byte_s"))
        return np.asarray(alpha + np.asarray(nbytes) * byte, np.float64)

    @property
    def bandwidth_Bps(self) -> float:
        """Of large messages."""
        return 1.0 / self.regimes[-1].byte_s

    @property
    def delays_s(self) -> Floats:
        """Of each regime: the part of the time in which a message shares nothing with others. A
        line that meets 0 seconds above 0 bytes, as where caches end, has none."""
        return np.maximum(self._column("alpha_s"), 0.0)

    def load(self, nbytes: Floats) -> Floats:
        """What is left of the time, as bytes at `bandwidth_Bps`: how much a message occupies."""
        left = self.at(nbytes) - self.delays_s[self.regime_of(nbytes)]
        return np.maximum(left, 0.0) * self.bandwidth_Bps

    def lightest(self, nbytes: float) -> float:
        """The least part of its bytes for which a message of up to `nbytes` occupies links: below
        1 where smaller messages are faster than large ones, as in caches."""
        line = [regime for regime in self.regimes if regime.least <= nbytes]
        parts = [r.byte_s + min(r.alpha_s, 0.0) / max(r.least, 1.0) for r in line]
        return max(0.0, min(parts)) * self.bandwidth_Bps

    def network(self, topology: Topology) -> Topology:
        """A network of such links: those of ranks have the rate of the model, others keep their
        part of that. Their latencies are in the model.

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
        """Seconds of an operation of `nbytes` on a network where nobody is in another's way; by
        default of the one that was measured. Raises `UnsupportedError` as `algorithms.cost` does.

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
    """An algorithm's rounds, and the part of the bytes that the busiest rank sends in each."""
    found = cost(op, algorithm, ranks=ranks)
    rounds = max(1, found.rounds)
    return rounds, float(found.bytes_sent) / rounds


def nearest(models: Sequence[LinkModel], op: Op | str, ranks: int) -> LinkModel:
    """The model that was measured most like this: the operation first, then the ranks.

    Raises `ValueError` if there is none.

    >>> flat = Regime(least=0, alpha_s=1e-6, byte_s=1e-9)
    >>> models = [
    ...     LinkModel(op="broadcast", ranks=ranks, regimes=(flat,), algorithm="chain")
    ...     for ranks in (2, 16)
    ... ]
    >>> nearest(models, "broadcast", 12).ranks
    16
    """
    if not models:
        raise ValueError("no link model to choose from")
    return min(models, key=lambda m: (m.op != str(op), abs(log(m.ranks / max(1, ranks)))))
