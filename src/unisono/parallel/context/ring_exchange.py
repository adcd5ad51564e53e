"""Messages around a ring of ranks, sent and received while the ranks compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingExchange:
    """A pending send of tensors to the next rank and receive of tensors from the previous rank."""

    received: Tensors
    works: Sequence[dist.Work]

    def wait(self) -> Tensors:
        """Waits for the send and the receive; returns the received tensors.

        Raises the errors of the group's backend.
        """
        for work in self.works:
            work.wait()
        return self.received


class RingExchange:
    """The ranks of a group as a ring, in which each rank sends to the next rank only."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._next = (self.rank + 1) % self.ranks
        self._previous = (self.rank - 1) % self.ranks

    def start(self, sent: Tensors, into: Tensors | None = None) -> PendingExchange:
        """Begins to send contiguous tensors, and to receive the tensors of the previous rank.

        `into`: tensors to receive into; by default new ones. The caller must not change `sent` or
        `into` until `wait` returns.
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
        """Yields (rank, tensors) for every rank: this rank, then the previous rank, and so on.

        The next tensors arrive while the caller computes with the current tensors. Two buffers hold
        them in turn, so the caller must not keep them. Each rank sends `ranks - 1` times.
        """
        present, spare = own, None
        for step in range(self.ranks):
            is_last = step == self.ranks - 1
            arriving = None if is_last else self.start(present, spare)
            yield (self.rank - step) % self.ranks, present
            if arriving is not None:
                # the caller's `own` must not be overwritten
                spare = None if present is own else present
                present = arriving.wait()
