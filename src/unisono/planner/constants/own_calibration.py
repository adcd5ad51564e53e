"""A calibration of predictions by the user's own measurements on a machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.constants.run_similarity import RunSimilarity
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.devices import Device
from unisono.planner.inputs.transformer import Transformer
from unisono.text_files import reading

FORMAT = "unisono planner calibration"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """A step time that the user measured, and the prediction without this measurement."""

    name: str
    like: RunSimilarity
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Logarithm of the measured over the predicted time."""
        return log(self.measured_s / self.predicted_s)


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


class RunEffect(NamedTuple):
    """The effect of a calibration on a prediction."""

    runs: int
    """Number of the user's runs with the same device and software as the prediction."""
    factor: float
    """Ratio of measured to predicted time, estimated from the user's runs."""
    unknown: float
    """Share of the error's variance that remains after calibration. It is 1 without runs of the
    user."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Runs and link rates that the user measured. Made by `calibrate`, for `predict` and `search`.

    The user's runs give one factor for all times. It is the efficiency of this machine and its
    software in comparison with the published runs. The errors of two runs correlate if the runs
    share the machine, the model or the work of each device. The factor is the best linear estimate
    from the errors of the user's runs (Henderson, Biometrics 31, 1975), so one run counts for less
    than its whole error.
    """

    runs: tuple[OwnRun, ...] = ()
    links: tuple[LinkRate, ...] = ()

    def constants_for(
        self, cluster: Cluster, constants: CalibratedConstants
    ) -> CalibratedConstants:
        """Returns the constants with the measured rates of the cluster's links."""
        return _with_links(self.links, cluster.kind, constants) if self.links else constants

    def effect(self, like: RunSimilarity, constants: CalibratedConstants) -> RunEffect:
        """Returns the calibration's effect on the prediction of a run with these properties."""
        return _effect(self.runs, like, constants)

    def least_factor(
        self, model: Transformer, precision: str, constants: CalibratedConstants
    ) -> float:
        """Returns the smallest factor (`RunEffect.factor`) that a layout of this model can have in
        this precision.
        """
        factors = [1.0]
        for machine in {run.like.machine for run in self.runs}:
            works = {run.like.work for run in self.runs if run.like.model == model}
            for work in (*works, (precision,)):
                factors.append(self.effect(RunSimilarity(machine, model, work), constants).factor)
        return min(factors)

    def document(self) -> dict[str, Any]:
        """Returns the calibration as JSON."""
        runs = [
            {
                "name": run.name,
                "machine": list(run.like.machine),
                "model": asdict(run.like.model),
                "work": list(run.like.work),
                "measured_s": run.measured_s,
                "predicted_s": run.predicted_s,
            }
            for run in self.runs
        ]
        links = [asdict(link) for link in self.links]
        return {"format": FORMAT, "version": _VERSION, "runs": runs, "links": links}

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
        """Returns the calibration of a JSON object. Raises ValueError for other objects."""
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(
                f"expected a file of `unisono plan --calibrate`, whose format is {FORMAT!r}"
            )
        if document.get("version") != _VERSION:
            raise ValueError(f"expected version {_VERSION}, found {document.get('version')!r}")
        try:
            runs = tuple(_own_run(entry) for entry in document["runs"])
            links = tuple(LinkRate(**entry) for entry in document["links"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this calibration is damaged: {error}") from error
        return cls(runs=runs, links=links)


def _own_run(entry: Mapping[str, Any]) -> OwnRun:
    device, software = entry["machine"]
    like = RunSimilarity((device, software), Transformer(**entry["model"]), tuple(entry["work"]))
    times = (entry["measured_s"], entry["predicted_s"])
    if not all(isinstance(each, (int, float)) and each > 0 for each in times):
        raise ValueError(f"expected positive seconds, found {times}")
    return OwnRun(name=entry["name"], like=like, measured_s=times[0], predicted_s=times[1])


@lru_cache(maxsize=32)
def _with_links(
    links: tuple[LinkRate, ...], device: Device, constants: CalibratedConstants
) -> CalibratedConstants:
    for link in links:
        if link.device != device.name:
            continue
        if link.place == "domain":
            known = ("link_share", "link_start_s", "link_rank_s")
            constants = constants.changed(
                covariance=constants.covariance.without(known),
                link_share=link.share * link.device_Bps / device.link_Bps,
                link_start_s=constants.link_start_s * link.start,
                link_rank_s=constants.link_rank_s * link.start,
            )
        else:
            share = link.share * link.device_Bps / device.network_Bps
            ratio = share / constants.network_share
            known = ("network_share", "network_start_s", "exchange_share")
            constants = constants.changed(
                covariance=constants.covariance.without(known),
                network_share=share,
                network_start_s=constants.network_start_s * link.start,
                exchange_share=constants.exchange_share * ratio,
            )
    return constants


@lru_cache(maxsize=4096)
def _effect(
    own: tuple[OwnRun, ...], like: RunSimilarity, constants: CalibratedConstants
) -> RunEffect:
    runs = [run for run in own if run.like.machine == like.machine]
    if not runs:
        return RunEffect(0, 1.0, 1.0)
    sigma = constants.sigma
    shared = np.array([run.like.covariance(like, sigma) for run in runs])
    matrix = np.array([[a.like.covariance(b.like, sigma) for a in runs] for b in runs])
    np.fill_diagonal(matrix, [run.like.variance(sigma) for run in runs])
    weights = np.linalg.solve(matrix, shared)
    errors = np.array([run.error for run in runs])
    unknown = max(1 - float(weights @ shared) / like.variance(sigma), 0.0)
    return RunEffect(len(runs), exp(float(weights @ errors)), unknown)
