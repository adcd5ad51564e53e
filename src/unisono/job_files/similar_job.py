"""The settings of another framework's job, and what its file leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.planner import Layout, Transformer, Workload


@dataclass(frozen=True, kw_only=True)
class SimilarJob:
    """The settings that a file of a job states. None: the file does not state them."""

    source: str
    """The framework of the file."""
    model: Transformer | None
    layout: Mapping[str, Any]
    """Fields of `Layout`, except dp, which follows from the devices."""
    workload: Mapping[str, Any]
    """Fields of `Workload`."""
    devices: int | None
    replica_batch: int | None = None
    """Sequences of a step on each data-parallel rank, for a file without a global batch."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """The reason for each gap of the file, by the option of `unisono plan` that fills it."""
    notes: tuple[str, ...] = ()
    """Settings that the planner reads as something similar."""
    assumed: tuple[str, ...] = ()
    """Settings for which the planner has no choice: it expects the usual value of the software."""
    without_effect: tuple[str, ...] = ()
    """Settings that change neither time nor memory."""
    unknown: tuple[str, ...] = ()
    """Settings that the planner does not know."""

    def layout_on(self, devices: int) -> Layout:
        """Returns the layout on a number of devices. Raises ValueError if the axes do not divide
        it.
        """
        rest = 1
        for axis in ("tp", "pp", "cp"):
            rest *= self.layout.get(axis, 1)
        if devices % rest:
            raise ValueError(
                f"tp x pp x cp of the file = {rest} does not divide {devices} devices; "
                f"{max(devices // rest, 1) * rest} devices work"
            )
        return Layout(**{**self.layout, "dp": devices // rest})

    def workload_on(self, layout: Layout, **stated: Any) -> Workload:
        """Returns the workload; values that are `stated` and not None replace those of the file.
        Raises ValueError for a missing value, with the option that states it.
        """
        found = {**self.workload, **{n: value for n, value in stated.items() if value is not None}}
        if "global_batch" not in found and self.replica_batch is not None:
            found["global_batch"] = self.replica_batch * layout.dp
        for name, option in (("seq", "--seq"), ("global_batch", "--batch")):
            if name not in found:
                why = self.missing.get(option, "the file does not state it")
                raise ValueError(f"{option} is needed: {why}")
        return Workload(**found)

    def lines(self) -> list[str]:
        """Returns the lines that say how the file was read."""
        groups = (
            ("read as something similar", "; ".join(self.notes)),
            ("without a setting here, as usual in this software", ", ".join(self.assumed)),
            ("without effect on time and memory", ", ".join(self.without_effect)),
            ("unknown", ", ".join(self.unknown)),
        )
        return [f"{what}: {text}" for what, text in groups if text]
