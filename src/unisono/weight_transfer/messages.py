"""Messages between a sender of weights and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unisono import config
from unisono.communicator import Communicator, join
from unisono.weight_transfer.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A worker has connected."""

    name: str
    """Host and process of the worker."""
    host: str
    """Identity of the host: equal for processes that can share memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The sender counts the worker among its workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The worker waits for an update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The sender has an update."""

    manifest: Manifest
    number: int
    """Number of the update, from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The worker takes an update, or refuses it."""

    refusal: str | None = None
    """Why the worker refuses the update; None if it takes part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The transfer begins."""

    group: GroupPlace | None
    """Place of the worker in a new group; None if the group of the last update is still right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """A rank of a group that is about to be made."""

    world: config.LaunchedRank
    secret: str = field(repr=False)
    join_timeout_s: float
    timeout_s: float

    def join(self, settings: config.Settings) -> Communicator:
        """Joins the group. Raises the errors of `communicator.join`."""
        own = replace(
            settings, job_secret=self.secret, job_secret_file=None, timeout_s=self.join_timeout_s
        )
        comm = join(self.world, own)
        comm.timeout_s = self.timeout_s
        return comm


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The transfer has ended on the worker."""

    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """The sender sends no more updates."""
