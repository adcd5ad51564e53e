"""Messages between ranks when a group forms, and records of updates lost with a server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from unisono.communicator import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """The state of one rank, a member, when a group forms."""

    number: int
    """Rank of the member in the first group of the parameter server."""
    step: int = 0
    """Number of steps that the member has completed as a worker."""
    finished: bool = False
    has_state: bool = False
    """True if the member brings a state from an earlier group or parameter server."""
    shards: Sequence[int] = ()
    """Shards whose state the member holds."""
    snapshots: Sequence[int] = ()
    """For each shard, the number of steps in the newest snapshot that the member can read; -1
    without a snapshot."""
    run: str
    """Identifier of the run in the names of snapshots."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings that must be equal on all ranks."""


def exchange_states(comm: Communicator, mine: MemberState) -> list[MemberState]:
    """Returns the states of all ranks, in rank order. Collective."""
    text = np.frombuffer(json.dumps(asdict(mine)).encode(), np.uint8)
    counts = comm.all_gather(np.array([text.size])).tolist()
    joined = comm.all_gather_v(text, counts=counts)
    ends = np.cumsum(counts)[:-1]
    return [MemberState(**json.loads(part.tobytes())) for part in np.split(joined, ends)]


def require_equal_settings(states: Sequence[MemberState]) -> None:
    """Raises `ValueError` on all ranks if a setting of some rank differs from that of rank 0."""
    first = states[0].settings
    for rank, member_state in enumerate(states):
        for name, value in member_state.settings.items():
            if value != first[name]:
                raise ValueError(
                    f"{name}: expected the same value on all ranks, found {first[name]} on rank 0 "
                    f"and {value} on rank {rank}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LostUpdates:
    """A shard whose server was lost, and the updates that the newest snapshot lacks."""

    shard: int
    place: str
    """Range of the shard's bytes and names of its tensors, as text."""
    lost_server: int
    new_server: int
    snapshot_step: int
    """Number of steps in the snapshot."""
    until_step: int
    """Largest number of steps that any worker had completed. The updates of steps `snapshot_step`
    to `until_step` - 1 are lost.
    """

    def __str__(self) -> str:
        first, last = self.snapshot_step, self.until_step - 1
        lost = f"the updates of steps {first} to {last} are lost"
        if first == last:
            lost = f"the update of step {first} is lost"
        if first > last:
            lost = "no completed step is lost"
        return (
            f"rank {self.lost_server}, the server of shard {self.shard}, was lost; rank "
            f"{self.new_server} goes on with {self.place} from the snapshot after "
            f"{self.snapshot_step} steps: {lost}"
        )
