"""A calibration of predictions by the user's own measurements: runs and rates of links."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Any

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.constants.prediction_error import PROPERTIES, ErrorCauses
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.devices import Device
from unisono.text_files import reading

_FORMAT = "unisono planner calibration"
_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """A step time that the user measured, and the prediction without this measurement."""

    name: str
    device: str
    software: str
    exchange: float
    """Share of exchanges in the predicted time."""
    host: float
    """Share of waiting for the host in the predicted time."""
    properties: tuple[str, ...]
    """Properties that add to the error, of `PROPERTIES`."""
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Logarithm of the measured over the predicted time."""
        return log(self.measured_s / self.predicted_s)

    @property
    def causes(self) -> ErrorCauses:
        """Causes of this error."""
        return ErrorCauses(self.exchange, self.host, self.properties)

    @classmethod
    def from_document(cls, entry: Mapping[str, Any]) -> OwnRun:
        """Returns the run of a JSON object. Raises ValueError or TypeError for others."""
        run = cls(**{**entry, "properties": tuple(entry.get("properties", ()))})
        times = (run.measured_s, run.predicted_s)
        if not all(isinstance(each, (int, float)) and each > 0 for each in times):
            raise ValueError(f"expected positive seconds, found {times}")
        shares = (run.exchange, run.host)
        if not all(isinstance(each, (int, float)) and 0 <= each <= 1 for each in shares):
            raise ValueError(f"expected shares between 0 and 1, found {shares}")
        unknown = set(run.properties) - set(PROPERTIES)
        if unknown:
            raise ValueError(f"expected properties of {PROPERTIES}, found {sorted(unknown)}")
        return run


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """Rate and start-up time of a device's links, fitted to measured collectives."""

    device: str
    place: str
    """"domain": inside a domain of fast links; "network": between domains."""
    share: float
    """Share of the link's rate that collectives reach."""
    device_Bps: float
    """Rate of the device's links when `share` was fitted. It differs later for the device "CPU",
    whose rates each process measures again."""
    start: float
    """Ratio of the fitted start-up times to those of the shipped constants."""
    samples: int
    error: float
    """Median of the relative errors of the fit."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Runs and link rates that the user measured. Made by `calibrate`, for `predict` and `search`.

    The user's runs with a device and a software give factors for the times of compute, of exchanges
    and of the host (`OwnFactors`).
    """

    runs: tuple[OwnRun, ...] = ()
    links: tuple[LinkRate, ...] = ()

    def with_links(self, cluster: Cluster, constants: CalibratedConstants) -> CalibratedConstants:
        """Returns the constants with the measured rates of the cluster's links."""
        return _with_links(self.links, cluster.kind, constants) if self.links else constants

    def own_runs(self, device: str) -> tuple[OwnRun, ...]:
        """Returns the runs on a device."""
        return tuple(run for run in self.runs if run.device == device)

    def document(self) -> dict[str, Any]:
        """Returns the calibration as JSON."""
        return {"format": _FORMAT, "version": _VERSION, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Writes the calibration to a JSON file."""
        Path(path).write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads a calibration that `save` wrote to a file. Raises ValueError for other content."""
        with reading(Path(path)) as text:
            return cls.from_document(json.loads(text))

    @classmethod
    def from_document(cls, document: Any) -> Calibration:
        """Returns the calibration in a JSON object. Raises ValueError for other objects."""
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(
                f"expected a file of `unisono plan --calibrate`, whose format is {_FORMAT!r}"
            )
        if document.get("version") != _VERSION:
            raise ValueError(
                f"expected version {_VERSION}, found {document.get('version')!r}; make the file "
                "again with `unisono plan --calibrate`"
            )
        try:
            runs = tuple(OwnRun.from_document(entry) for entry in document["runs"])
            links = tuple(LinkRate(**entry) for entry in document["links"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this calibration is damaged: {error}") from error
        return cls(runs=runs, links=links)


@lru_cache(maxsize=32)
def _with_links(
    links: tuple[LinkRate, ...], device: Device, constants: CalibratedConstants
) -> CalibratedConstants:
    for link in links:
        if link.device != device.name:
            continue
        if link.place == "domain":
            constants = constants.changed(
                link_share=link.share * link.device_Bps / device.link_Bps,
                link_start_s=constants.link_start_s * link.start,
                link_rank_s=constants.link_rank_s * link.start,
            )
        else:
            share = link.share * link.device_Bps / device.network_Bps
            ratio = share / constants.network_share
            constants = constants.changed(
                network_share=share,
                network_start_s=constants.network_start_s * link.start,
                exchange_share=constants.exchange_share * ratio,
            )
    return constants
