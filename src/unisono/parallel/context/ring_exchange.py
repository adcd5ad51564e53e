"""Messages around a ring of ranks, that travel while the rank computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingExchange:
    """Tensors on their way to the next rank, and others on their way from the previous one."""

    received: Tensors
    works: Sequence[dist.Work]

    def wait(self) -> Tensors:
        """Waits for both; returns the received tensors. Raises the backend's errors."""
        for work in self.works:
            work.wait()
        return self.received


class RingExchange:
    """The ranks of a group as a ring: each sends to the next rank only."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._next = (self.rank + 1) % self.ranks
        self._previous = (self.rank - 1) % self.ranks

    def start(self, sent: Tensors, into: Tensors | None = None) -> PendingExchange:
        """Begins to send contiguous tensors, and to receive those of the previous rank.

        `into`: tensors to receive in; by default new ones. Neither may be changed until `wait`
        returns.
        """
        received = into or tuple(torch.empty_like(each) for each in sent)
        messages = [
            dist.P2POp(dist.isend, each, group=self._group, group_peer=self._next) for each in sent
        ] + [
            dist.P2POp(dist.irecv, each, group=self._group, group_peer=self._previous)
            for each in received
        ]
        return PendingExchange(received=received, works=dist.batch_isend_irecv(messages))

    def visit(self, own: Tensors) -> Iterator[tuple[int, Tensors]]:
        """Yields each rank's tensors, with their rank: this rank's own, then the previous rank's.

        The next tensors arrive while the caller computes with the present ones. They are in two
        buffers in turn, so the caller must not keep them. Sends `ranks - 1` times.
        """
        present, spare = own, None
        for step in range(self.ranks):
            is_last = step == self.ranks - 1
            arriving = None if is_last else self.start(present, spare)
            yield (self.rank - step) % self.ranks, present
            if arriving is not None:
                spare = None if present is own else present  # never receive in the caller's arrays
                present = arriving.wait()
