"""A step time that the user measured, beside the prediction without this measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import log
from typing import Any

from unisono.planner.constants.run_similarity import RunSimilarity
from unisono.planner.inputs.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """A step time that the user measured, and the prediction without this measurement."""

    name: str
    like: RunSimilarity
    measured_s: float
    predicted_s: float
    derivatives: tuple[tuple[str, float], ...] = ()
    """Constants, and the derivatives of the logarithm of the predicted time by the logarithms of
    these constants. A constant that is absent does not change the time."""

    @property
    def error(self) -> float:
        """Logarithm of the measured over the predicted time."""
        return log(self.measured_s / self.predicted_s)

    def document(self) -> dict[str, Any]:
        """Returns the run as JSON."""
        return {
            "name": self.name,
            "machine": list(self.like.machine),
            "model": asdict(self.like.model),
            "work": list(self.like.work),
            "causes": list(self.like.causes),
            "measured_s": self.measured_s,
            "predicted_s": self.predicted_s,
            "derivatives": dict(self.derivatives),
        }

    @classmethod
    def from_document(cls, entry: Mapping[str, Any]) -> OwnRun:
        """Returns the run of a JSON object. Raises ValueError, KeyError or TypeError for others."""
        device, software = entry["machine"]
        like = RunSimilarity(
            (device, software),
            Transformer(**entry["model"]),
            tuple(entry["work"]),
            tuple(entry["causes"]),
        )
        times = (entry["measured_s"], entry["predicted_s"])
        if not all(isinstance(each, (int, float)) and each > 0 for each in times):
            raise ValueError(f"expected positive seconds, found {times}")
        derivatives = tuple((name, float(value)) for name, value in entry["derivatives"].items())
        return cls(
            name=entry["name"],
            like=like,
            measured_s=times[0],
            predicted_s=times[1],
            derivatives=derivatives,
        )
