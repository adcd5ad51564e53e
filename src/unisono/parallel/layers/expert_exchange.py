"""The exchange of tokens with the ranks that hold their experts."""

from __future__ import annotations

import torch
from torch import distributed as dist

from unisono.parallel.divisible.exchanges import Group, move_rows


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
