"""The error of a prediction: its causes, and the interval that follows from them.

The error is the logarithm of measured over predicted time. It has a part that all runs of a source
share, further parts for the shares of exchanges and of the host in the step time, parts for
properties that only some runs have, and the part of the single run, which is larger with experts:
releases of one library with the same stated choices differ more. All parts are normally
distributed, and `CalibratedConstants.sigma` has their standard deviations.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import LOW_PRECISIONS, Workload

PROPERTIES = ("experts", "low precision", "other device", "not stated")
"""Properties of a run that add to its error: experts, formats under 16 bits (which scale values in
several ways), an architecture with few published runs, and choices that are not stated."""
PARTS = ("source", "exchange", "host", *PROPERTIES)
"""The parts of an error that the runs of one source share."""
KNOWN_ARCHITECTURES = ("ampere", "hopper", "blackwell")
"""Architectures of devices with many published runs."""
NORMAL_80 = 1.2816
"""Half of the width of the interval that holds 80 % of a normal distribution, in standard
deviations."""

_EXCHANGE = ("tensor", "context", "expert", "shards", "send", "gradients", "exchange")
_HOST = ("host", "step")

Floats = NDArray[np.float64]


def group_of(kind: str) -> str:
    """Returns the group of a kind of time: compute, exchange or host.

    >>> group_of("matmul"), group_of("gradients"), group_of("step")
    ('compute', 'exchange', 'host')
    """
    return "exchange" if kind in _EXCHANGE else "host" if kind in _HOST else "compute"


class ErrorCauses(NamedTuple):
    """Causes of the error of one prediction."""

    exchange: float
    """Share of exchanges in the step time."""
    host: float
    """Share of waiting for the host in the step time."""
    properties: tuple[str, ...]
    """The run's properties, of `PROPERTIES`."""

    @classmethod
    def of(cls, kinds: Mapping[str, float], properties: tuple[str, ...]) -> ErrorCauses:
        """Returns the causes of a run whose seconds by kind are `kinds`."""
        seconds = dict.fromkeys(("compute", "exchange", "host"), 0.0)
        for kind, each in kinds.items():
            seconds[group_of(kind)] += each
        whole = sum(seconds.values())
        return cls(seconds["exchange"] / whole, seconds["host"] / whole, properties)

    def weights(self) -> Floats:
        """Returns the weight [`PARTS`] of each part in the error."""
        given = (1.0 if name in self.properties else 0.0 for name in PROPERTIES)
        return np.array([1.0, self.exchange, self.host, *given])

    def single_variance(self, sigma: Mapping[str, float]) -> float:
        """Returns the variance of the part of the single run."""
        more = sigma["expert run"] ** 2 if "experts" in self.properties else 0.0
        return sigma["run"] ** 2 + more

    def deviation(self, sigma: Mapping[str, float]) -> float:
        """Returns the standard deviation of the error, without runs of the same source.

        >>> causes = ErrorCauses(0.5, 0.0, ())
        >>> causes.deviation({**dict.fromkeys(PARTS, 0.0), "exchange": 0.6, "run": 0.4})
        0.5
        """
        parts = self.weights() * [sigma[name] for name in PARTS]
        return sqrt(float(parts @ parts) + self.single_variance(sigma))


def properties_of(model: Transformer, cluster: Cluster, job: Workload) -> tuple[str, ...]:
    """Returns the properties of a run that add to its error. `job` is the workload before the
    planner made the open choices.
    """
    given = {
        "experts": model.experts > 0,
        "low precision": job.precision in LOW_PRECISIONS,
        "other device": cluster.kind.architecture not in KNOWN_ARCHITECTURES,
        "not stated": job.micro_batch is None or job.recompute is None,
    }
    return tuple(name for name in PROPERTIES if given[name])
