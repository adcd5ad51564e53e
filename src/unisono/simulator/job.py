"""Jobs that are simulated together: collectives of groups, messages, and computations."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from unisono.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Parameters of the executor's blocks: their size, the lead of early rounds, and the number of
    blocks with slots. See `docs/hosts.md` and `csrc/execution/executor.h`."""

    block_bytes: float
    """Bytes of each chunk in one block."""
    lead: int = 2
    """Number of blocks by which the executor runs the first round of the schedule ahead of the last
    round."""
    depth: int = 4
    """Number of blocks for which a rank has staging slots at the same time."""

    def __post_init__(self) -> None:
        if not 0 < self.block_bytes < inf or self.depth < 1 or self.lead < 0:
            raise ValueError(
                "blocks: block_bytes must be positive and finite, depth at least 1, lead at "
                f"least 0: {self}"
            )


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
    """Bytes of a rank's whole vector, or of all its pieces together; the N of `algorithms.cost`."""
    name: str = ""
    ranks: tuple[int, ...] | None = None
    """The network's rank for each rank of the schedule. With None, rank r is the network's rank
    r."""
    after: tuple[str, ...] = ()
    """Names of jobs that a rank must finish before it takes part in this job."""
    start_s: float = 0.0
    """Earliest time in seconds at which a rank takes part."""
    first_round: int = 0
    """Number that is added to the job's round numbers, so that `Order.STREAMS` can order the
    messages of several jobs."""
    blocks: Blocks | None = None
    """Blocks in which the executor runs the job on different hosts. With None, the job has no
    blocks, and a message leaves when its values are available."""

    def __post_init__(self) -> None:
        try:
            valid = 0 <= self.nbytes < inf
        except TypeError:
            error = f"job {self.name!r}: nbytes must be a number of bytes, got {self.nbytes!r}"
            raise TypeError(error) from None
        if not valid:
            raise ValueError(
                f"job {self.name!r}: nbytes must be at least 0 and finite, got {self.nbytes}"
            )
        if not 0 <= self.start_s < inf:
            raise ValueError(
                f"job {self.name!r}: start_s must be at least 0 and finite, got {self.start_s}"
            )
        count = self.schedule.collective.ranks
        if self.ranks is not None and len(set(self.ranks)) != count:
            raise ValueError(
                f"job {self.name!r}: a schedule of {count} ranks needs as many different "
                f"ranks, got {len(set(self.ranks))}"
            )

    @property
    def members(self) -> tuple[int, ...]:
        """The participating ranks of the network."""
        return tuple(range(self.schedule.collective.ranks)) if self.ranks is None else self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A computation on some ranks, without communication. A rank takes `seconds` times its
    `slowdown`."""

    seconds: float
    ranks: tuple[int, ...]
    name: str = ""
    after: tuple[str, ...] = ()
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < inf or not 0 <= self.start_s < inf:
            raise ValueError(
                f"compute {self.name!r}: seconds and start_s must be at least 0 and finite, "
                f"got {self.seconds} and {self.start_s}"
            )

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that compute."""
        return self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message of `nbytes` bytes from the rank `src` to the rank `dst`.

    The message leaves when `src` has finished the jobs that `after` names, and not before
    `start_s`. A job of `src` whose `after` names the message waits until the message has arrived. A
    job whose `after` names only the jobs in the message's `after` runs while the message is sent. A
    message of 0 bytes takes no time. With `Order.STREAMS`, messages from `src` to `dst` leave one
    after another, sorted by the length of the longest chain of jobs before them, then by their
    place in the list of jobs. Raises ValueError for negative or infinite numbers, and if `src` is
    `dst`.

    >>> Message(src=0, dst=1, nbytes=4096, name="activation", after=("forward",)).members
    (0, 1)
    """

    src: int
    dst: int
    nbytes: float
    name: str = ""
    after: tuple[str, ...] = ()
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.nbytes < inf or not 0 <= self.start_s < inf:
            raise ValueError(
                f"message {self.name!r}: nbytes and start_s must be at least 0 and finite, got "
                f"{self.nbytes} and {self.start_s}"
            )
        if self.src == self.dst:
            raise ValueError(
                f"message {self.name!r}: needs two different ranks, got {self.src} twice"
            )

    @property
    def members(self) -> tuple[int, ...]:
        """The sender and the receiver."""
        return (self.src, self.dst)


AnyJob = Job | Compute | Message
"""Something that is simulated: a collective, a computation or a message."""
