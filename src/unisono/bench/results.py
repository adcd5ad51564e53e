"""Measurements of a benchmark run, and numbers derived from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import geometric_mean, median, quantiles
from typing import Any

from unisono.bench.cases import Case
from unisono.bench.contestants import LIMITS, MEMORY
from unisono.bench.link_rate import LinkRate

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one contestant and one case. `times_s` has the seconds per call of each
    round."""

    contestant: str
    times_s: tuple[float, ...] = ()
    iterations: int = 0
    wrong: int = 0
    """Number of wrong elements on all ranks."""
    error: str | None = None
    late_s: tuple[tuple[float, ...], ...] = ()
    """Seconds by which each rank started later than the first rank, for each round."""

    @property
    def median_s(self) -> float | None:
        return median(self.times_s) if self.times_s else None

    @property
    def spread_s(self) -> tuple[float, float] | None:
        """First and third quartile of the seconds per call."""
        if len(self.times_s) < 2:
            return None
        first, _, third = quantiles(self.times_s, n=4, method="inclusive")
        return first, third


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The alternating measurements of all contestants for one case."""

    case: Case
    measurements: tuple[Measurement, ...]
    probes_s: tuple[float, ...] = ()
    link: LinkRate | None = None
    """Rate of the links between hosts directly after the row. None without a lab, or if the rate is
    not known."""
    predicted_s: float | None = None
    """Seconds per call of Unisono that a link model predicts."""

    def of(self, contestant: str) -> Measurement | None:
        return next((m for m in self.measurements if m.contestant == contestant), None)

    def algbw_Bps(self, measurement: Measurement) -> float | None:
        """Returns the bytes of the larger buffer divided by the time."""
        time_s = measurement.median_s
        return self.case.size_bytes / time_s if time_s else None

    def busbw_Bps(self, measurement: Measurement) -> float | None:
        """Returns the algorithm bandwidth times the bus factor of nccl-tests. For messages between
        pairs, returns the total bandwidth of all pairs."""
        algbw = self.algbw_Bps(measurement)
        factor = self.case.operation.bus_factor(self.case.ranks)
        return None if algbw is None else algbw * factor

    def messages_per_s(self, measurement: Measurement) -> float | None:
        """Returns the messages per second of all pairs together."""
        time_s = measurement.median_s
        if not time_s or not self.case.operation.paired:
            return None
        return self.case.ranks / 2 / time_s

    def ratio(self, contestant: str, reference: str) -> float | None:
        """Returns the time of `contestant` divided by the time of `reference`. Above 1, the
        reference is faster."""
        times_s = [m.median_s for m in (self.of(contestant), self.of(reference)) if m is not None]
        if len(times_s) != 2 or times_s[0] is None or not times_s[1]:
            return None
        return times_s[0] / times_s[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The report of a benchmark run. All contestants are compared with the contestant `ours`."""

    ours: str
    contestants: tuple[str, ...]
    rows: tuple[Row, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()

    @property
    def limit(self) -> str:
        """Name of the limit with which contestants are compared."""
        return next((name for name in self.contestants if name in LIMITS), MEMORY)

    @property
    def why_stated(self) -> str | None:
        """The reason why the limit is computed from the stated rate of the links. None if it is
        not."""
        reasons = (row.link.why_stated for row in self.rows if row.link)
        return next(filter(None, reasons), None)

    @property
    def wrong(self) -> int:
        return sum(m.wrong for row in self.rows for m in row.measurements)

    @property
    def failed(self) -> bool:
        """True if a result was wrong, or if the contestant `ours` did not finish a case."""
        ours = (row.of(self.ours) for row in self.rows)
        unfinished = any(m is not None and m.error is not None for m in ours)
        return self.wrong > 0 or unfinished or self.ours in self.skipped

    def mean_ratio(self, contestant: str) -> float | None:
        """Returns the geometric mean of the ratios of the contestant's time to the time of
        `ours`."""
        return mean_of_ratios(row.ratio(contestant, self.ours) for row in self.rows)

    def mean_limit_ratio(self, contestant: str) -> float | None:
        """Returns the geometric mean of the ratios of the contestant's time to the time of the
        limit."""
        return mean_of_ratios(row.ratio(contestant, self.limit) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns all data for JSON, including the times of each round, in seconds and bytes."""
        return {
            "schema": SCHEMA,
            "command": list(self.command),
            "machine": self.machine,
            "settings": self.settings,
            "ours": self.ours,
            "limit": self.limit,
            "limit_from_stated_rate": self.why_stated,
            "skipped": self.skipped,
            "rows": [_row_to_dict(row, self.ours, self.limit) for row in self.rows],
            "geometric_mean": {
                name: {
                    "time_over_ours": self.mean_ratio(name),
                    "time_over_limit": self.mean_limit_ratio(name),
                }
                for name in self.contestants
            },
            "wrong": self.wrong,
        }


def mean_of_ratios(ratios: Iterable[float | None]) -> float | None:
    """Returns the geometric mean of the ratios that are not None."""
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known) if known else None


def _row_to_dict(row: Row, ours: str, limit: str) -> dict[str, Any]:
    return {
        **row.case.to_dict(),
        "size_bytes": row.case.size_bytes,
        "count": row.case.count,
        "probes_s": list(row.probes_s),
        "payload_Bps": row.link.rate_Bps if row.link and not row.link.why_stated else None,
        "stated_Bps": row.link.rate_Bps if row.link and row.link.why_stated else None,
        "predicted_s": row.predicted_s,
        "results": {
            m.contestant: _measurement_to_dict(row, m, ours, limit) for m in row.measurements
        },
    }


def _measurement_to_dict(
    row: Row, measurement: Measurement, ours: str, limit: str
) -> dict[str, Any]:
    return {
        "time_s": measurement.median_s,
        "spread_s": measurement.spread_s,
        "algbw_Bps": row.algbw_Bps(measurement),
        "busbw_Bps": row.busbw_Bps(measurement),
        "messages_per_s": row.messages_per_s(measurement),
        "time_over_ours": row.ratio(measurement.contestant, ours),
        "time_over_limit": row.ratio(measurement.contestant, limit),
        "wrong": measurement.wrong,
        "error": measurement.error,
        "iterations": measurement.iterations,
        "times_s": list(measurement.times_s),
    }
