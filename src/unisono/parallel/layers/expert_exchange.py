"""The exchange of tokens with the ranks that hold their experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from unisono.parallel.divisible.exchanges import Group


class ExpertExchange:
    """One exchange of rows between the ranks of `ep`: to the experts, and back.

    Each rank holds an equal number of consecutive experts. Without a group, rows are not exchanged.
    """

    def __init__(self, counts: torch.Tensor, group: Group) -> None:
        """Exchanges `counts`, the number of this rank's rows for each expert. Collective.

        So `dispatch` and `combine` know the sizes of their messages.
        """
        self._group = group
        ranks = 1 if group is None else dist.get_world_size(group)
        arriving = counts.clone()
        if group is not None:
            dist.all_to_all_single(arriving, counts, group=group)
        table = arriving.view(ranks, -1)
        self._sent: list[int] = counts.view(ranks, -1).sum(1).tolist()
        self._arrived: list[int] = table.sum(1).tolist()
        self.counts: list[int] = table.sum(0).tolist()
        """Number of rows for each expert of this rank."""
        experts = torch.arange(table.shape[1]).repeat(ranks)
        self._by_expert = experts.repeat_interleave(arriving).argsort(stable=True)

    @property
    def rows_moved(self) -> int:
        """Number of rows that this rank sends to others in `dispatch` and `combine` together."""
        return self.rows_dispatched + self.rows_combined

    @property
    def rows_dispatched(self) -> int:
        """Number of rows that this rank sends to others in `dispatch`."""
        return self._to_others(self._sent)

    @property
    def rows_combined(self) -> int:
        """Number of rows that this rank sends to others in `combine`."""
        return self._to_others(self._arrived)

    def _to_others(self, counts: list[int]) -> int:
        return 0 if self._group is None else sum(counts) - counts[dist.get_rank(self._group)]

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows, sorted by expert, to their experts; returns the rows for this rank's experts.

        The result is sorted by expert too.
        """
        if self._group is None:
            return rows
        return move_rows(rows, self._group, self._sent, self._arrived)[self._by_expert]

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends the experts' results back; returns them in the order of the input of `dispatch`."""
        if self._group is None:
            return rows
        back = torch.empty_like(self._by_expert)
        back[self._by_expert] = torch.arange(len(back))
        return move_rows(rows[back], self._group, self._arrived, self._sent)


def move_rows(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int], arriving: list[int]
) -> torch.Tensor:
    """Sends the first `sent[0]` rows to rank 0 of the group, the next to rank 1, and so on.

    Returns `arriving[i]` rows from each rank i, in rank order. The backward pass sends the
    gradients back. Collective.
    """
    found: torch.Tensor = _Move.apply(  # type: ignore[no-untyped-call]
        rows, group, sent, arriving
    )
    return found


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int], arriving: list[int]
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.arriving = group, sent, arriving
        return _exchanged(rows, group, sent, arriving)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # Gradients of zero are sent too: a rank that did not take part would hang its peers.
        return _exchanged(gradients[0], ctx.group, ctx.arriving, ctx.sent), None, None, None


def _exchanged(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int], arriving: list[int]
) -> torch.Tensor:
    found = rows.new_empty(sum(arriving), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), arriving, sent, group=group)
    return found
