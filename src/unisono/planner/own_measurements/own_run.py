"""A step time that the user measured, beside the prediction without this measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import log
from typing import Any

from unisono.planner.constants.prediction_error import PROPERTIES, ErrorCauses


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

    def document(self) -> dict[str, Any]:
        """Returns the run as JSON."""
        return {**asdict(self), "properties": list(self.properties)}

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
