"""The rates of links, fitted to the times of collectives that the user measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.own_measurements.calibration import LinkRate
from unisono.planner.step_times.exchange_times import ExchangeTimes, GroupPlace
from unisono.simulator import Sample, of_contestant, read

_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Number of times that a ring moves (n-1)/n of the larger buffer, by operation."""
_HOST = re.compile(r"#\s+Rank\s+\d+\s.*?\bon\s+(\S+)\s+device", re.IGNORECASE)
_LEAST_BYTES = 1 << 16
"""Minimum size of a message in the fit. Smaller messages use other algorithms (NCCL: LL), and do
not matter in training."""
_LEAST_SHARE = 0.1
"""Minimum share of the largest message's time that its bytes must take. Otherwise the rate cannot
be fitted."""
_ROUNDS = 20


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """Measured collectives of one file."""

    samples: tuple[Sample, ...]
    hosts: int | None
    """Number of hosts; None if the file does not state it."""


def read_collectives(text: str) -> CollectiveTimes:
    """Returns the times of collectives in the output of nccl-tests, `unisono bench --json` or
    `unisono tune`.

    If a benchmark compares libraries, uses the times of the first one. Raises ValueError for other
    texts, and if the text has no all_reduce, all_gather or reduce_scatter.
    """
    usable = [each for each in read(text) if each.op in _PASSES]
    if not usable:
        raise ValueError(f"expected times of {', '.join(_PASSES)}; found none of them")
    samples = tuple(of_contestant(usable, None))
    return CollectiveTimes(samples=samples, hosts=_hosts(text))


def _hosts(text: str) -> int | None:
    """Returns the number of hosts. `unisono bench` runs on one host, unless its settings describe a
    cluster.
    """
    if text.lstrip().startswith("{"):
        settings = json.loads(text).get("settings")
        cluster = settings.get("cluster") if isinstance(settings, dict) else None
        if isinstance(cluster, dict):
            return int(cluster["hosts"])
        return 1 if isinstance(settings, dict) else None
    return len({match[1] for match in _HOST.finditer(text)}) or None


def fit_links(
    files: Sequence[CollectiveTimes], cluster: Cluster, constants: CalibratedConstants
) -> list[LinkRate]:
    """Returns the link rates inside and between domains, fitted to measured times.

    The times of messages of at least 64 KiB are fitted to the ring of `exchange_times`: a start-up
    time, and bytes over the rate. A file gives the rate between domains if its ranks are on several
    hosts or do not fit in one domain. The fit minimises relative absolute deviations, so outliers
    have little weight. Raises ValueError if times do not grow with the size.
    """
    found, base = [], constants
    for place in ("domain", "network"):
        rows = [row for each in files for row in _rows(each, cluster, place)]
        if len({row[0] for row in rows}) < 2:
            if rows:
                raise ValueError(
                    f"expected at least 2 sizes of 64 KiB or more ({place}), found {len(rows)}"
                )
            continue
        link = _fit(rows, cluster, base, place)
        found.append(link)
        if place == "domain":
            base = base.changed(
                link_start_s=base.link_start_s * link.start,
                link_rank_s=base.link_rank_s * link.start,
            )
    return found


_Row = tuple[float, float, GroupPlace]
"""Bytes that a rank of the ring sends, the seconds, and the position of the group."""


def _rows(file: CollectiveTimes, cluster: Cluster, place: str) -> Iterable[_Row]:
    for sample in file.samples:
        hosts = file.hosts or -(-sample.ranks // cluster.domain)
        local = max(sample.ranks // hosts, 1)
        inside = local >= sample.ranks
        if inside != (place == "domain") or sample.nbytes < _LEAST_BYTES:
            continue
        sent = _PASSES[sample.op] * sample.nbytes * (sample.ranks - 1) / sample.ranks
        yield sent, sample.seconds, GroupPlace(sample.ranks, local, 1)


def _fit(
    rows: Sequence[_Row], cluster: Cluster, constants: CalibratedConstants, place: str
) -> LinkRate:
    """Fits `start` and `share` in: seconds = start x (shipped start-up time) + bytes / (share x
    rate).
    """
    exchanges = ExchangeTimes(cluster, constants)
    begins, fixed, terms = [], [], []
    for sent, _, group in rows:
        domains = group.ranks / group.local
        network_s = constants.network_start_s * log2(domains) if domains > 1 else 0.0
        whole_s = exchanges.start_s(group)
        begins.append(whole_s if place == "domain" else network_s)
        fixed.append(0.0 if place == "domain" else whole_s - network_s)
        rate = cluster.domain_Bps if place == "domain" else cluster.between_Bps * group.local
        terms.append(sent / rate)
    seconds = np.array([row[1] for row in rows])
    columns = np.column_stack([begins, terms])
    start, inverse = _least_deviations(columns, seconds - np.array(fixed), seconds)
    if inverse * max(terms) < _LEAST_SHARE * max(seconds):
        raise ValueError("the times do not grow with the size, so they show no rate")
    fitted = np.array(fixed) + columns @ np.array([start, inverse])
    return LinkRate(
        device=cluster.kind.name,
        place=place,
        share=float(1 / inverse),
        device_Bps=cluster.kind.link_Bps if place == "domain" else cluster.kind.network_Bps,
        start=float(start),
        samples=len(rows),
        error=float(np.median(np.abs(fitted / seconds - 1))),
    )


def _least_deviations(
    columns: NDArray[np.float64], targets: NDArray[np.float64], scale: NDArray[np.float64]
) -> tuple[float, float]:
    """Returns the two non-negative coefficients with the least sum of relative absolute deviations.

    The method is iteratively reweighted least squares.
    """
    weights = 1 / scale
    start = inverse = 0.0
    for _ in range(_ROUNDS):
        first, second = (columns * weights[:, None]).T
        wanted = targets * weights
        start, inverse = np.linalg.lstsq(np.column_stack([first, second]), wanted, rcond=None)[0]
        if start < 0:
            start, inverse = 0.0, float(second @ wanted / (second @ second))
        fitted = columns @ np.array([start, inverse])
        larger = np.maximum(scale, fitted)  # so that no relative error exceeds 1
        errors = np.abs(fitted - targets) / larger
        weights = 1 / larger / np.sqrt(np.maximum(errors, 1e-3))
    return float(start), float(inverse)
