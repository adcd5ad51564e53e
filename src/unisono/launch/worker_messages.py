"""Messages between the program that calls `unisono.run` and the worker of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from unisono import config


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Message of a worker that is ready to start a rank."""

    rank: int
    version: str
    """Version of unisono."""
    host: str
    """Identity of the host: equal for ranks that share a loopback interface."""
    address: str
    """Address at which other hosts reach this one."""
    ports: tuple[int, int]
    """Free ports for the rendezvous of unisono and for torch's store; used if this is rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Message to the process of a rank: all that it needs to begin."""

    world: config.LaunchedRank
    place: config.LocalRank
    master: tuple[str, int]
    """Host and port of torch's store."""
    secret: str = field(repr=False)
    """The job's secret, random for each run."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the program, for ranks whose worker does not set them."""
    call: bytes = field(repr=False, default=b"")
    """The pickled function and its arguments."""

    def export(self) -> None:
        """Sets the environment variables of this process."""
        config.adopt(self.variables, self.secret)
        config.export(self.world)
        config.export_to_torch(self.world, self.master, self.place)


def version() -> str:
    """Returns the version of unisono, or "unknown" if unisono is not installed but on the path."""
    try:
        return metadata.version("unisono")
    except metadata.PackageNotFoundError:
        return "unknown"
