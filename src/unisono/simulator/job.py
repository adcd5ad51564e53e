"""What is simulated together: collectives of groups, and computing between them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from unisono.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks and stagger of an executor; see `docs/hosts.md` and `csrc/execution/executor.h`."""

    block_bytes: float
    """Of each part of the vector."""
    lead: int = 2
    """By how many blocks the first round runs ahead of the last."""
    depth: int = 4
    """Blocks whose slots a rank has room for."""

    def __post_init__(self) -> None:
        if not 0 < self.block_bytes < inf or self.depth < 1 or self.lead < 0:
            raise ValueError(f"blocks: not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A collective of some ranks.

    >>> from unisono import algorithms
    >>> ring = algorithms.build("all_reduce", "ring", ranks=2)
    >>> Job(name="gradients", schedule=ring, nbytes=1 << 20, ranks=(0, 4), after=("backward",)).name
    'gradients'
    """

    schedule: Schedule
    nbytes: float
    """Of the whole vector of a rank, or all its pieces together: N of `algorithms.cost`."""
    name: str = ""
    ranks: tuple[int, ...] | None = None
    """Which rank of the network each rank of the schedule is; None: the same."""
    after: tuple[str, ...] = ()
    """Names of what a rank must have done before it takes part; each rank for itself."""
    start_s: float = 0.0
    """No rank takes part earlier."""
    first_round: int = 0
    """Where its rounds are among those of other jobs, for `Order.STREAMS`."""
    blocks: Blocks | None = None
    """How the executor of ranks on different hosts runs it; None: all at once, each message when
    its values are there."""

    def __post_init__(self) -> None:
        try:
            some = 0 <= self.nbytes < inf
        except TypeError:
            told = f"job {self.name!r}: nbytes is a number of bytes, not {self.nbytes!r}"
            raise TypeError(told) from None
        if not some:
            raise ValueError(f"job {self.name!r}: {self.nbytes} bytes")
        if not 0 <= self.start_s < inf:
            raise ValueError(f"job {self.name!r}: start_s is a time, not {self.start_s}")
        count = self.schedule.collective.ranks
        if self.ranks is not None and len(set(self.ranks)) != count:
            raise ValueError(
                f"job {self.name!r}: a schedule of {count} ranks on {len(set(self.ranks))} "
                "different ranks"
            )

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the network that take part."""
        return tuple(range(self.schedule.collective.ranks)) if self.ranks is None else self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Time that each of some ranks spends without sending, times its `slowdown`."""

    seconds: float
    ranks: tuple[int, ...]
    name: str = ""
    after: tuple[str, ...] = ()
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < inf or not 0 <= self.start_s < inf:
            raise ValueError(f"compute {self.name!r}: {self.seconds} s from {self.start_s} s on")

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that compute."""
        return self.ranks
