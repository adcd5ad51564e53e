"""The exchange of tokens with the ranks that hold their experts."""

from __future__ import annotations

import torch
from torch import distributed as dist

from unisono.parallel.divisible.exchanges import Group, exchange_rows, moved_rows
from unisono.torch_backend import all_gather_single, row_exchange_of

_COUNT_BYTES = 8


def expert_overhead_bytes(group: dist.ProcessGroup, *, experts: int, moves: int) -> int:
    """Returns the bytes that a rank sends besides rows in one `ExpertExchange`: the counts of all
    experts, and the headers of `moves` passes of `dispatch` and `combine`.
    """
    exchange = row_exchange_of(group)
    header_bytes = 0 if exchange is None else exchange.header_bytes
    return (dist.get_world_size(group) - 1) * (experts * _COUNT_BYTES + moves * header_bytes)


class ExpertExchange:
    """One exchange of rows between the ranks of `ep`: to the experts, and back.

    Each rank holds an equal number of consecutive experts. Without a group, rows are not exchanged.
    """

    def __init__(self, counts: torch.Tensor, group: Group) -> None:
        """Exchanges `counts`, the number of this rank's rows for each expert. Collective.

        So all ranks know how many rows every rank sends to every other rank.
        """
        self._group = group
        ranks = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        everything = counts
        if group is not None:
            everything = counts.new_empty(ranks * len(counts))
            all_gather_single(everything, counts, group=group)
        by_owner = everything.view(ranks, ranks, -1)  # source, owner, expert of the owner
        self._there: list[list[int]] = by_owner.sum(2).tolist()
        self._back = [list(column) for column in zip(*self._there, strict=True)]
        self._rank = rank
        arriving = by_owner[:, rank]
        self.counts: list[int] = arriving.sum(0).tolist()
        """Number of rows for each expert of this rank."""
        experts = torch.arange(arriving.shape[1]).repeat(ranks)
        self._by_expert = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        self._by_source = torch.empty_like(self._by_expert)
        self._by_source[self._by_expert] = torch.arange(len(self._by_expert))

    @property
    def rows_moved(self) -> int:
        """Number of rows that this rank sends to others in `dispatch` and `combine` together."""
        return self.rows_dispatched + self.rows_combined

    @property
    def rows_dispatched(self) -> int:
        """Number of rows that this rank sends to others in `dispatch`."""
        return self._to_others(self._there[self._rank])

    @property
    def rows_combined(self) -> int:
        """Number of rows that this rank sends to others in `combine`."""
        return self._to_others(self._back[self._rank])

    def _to_others(self, counts: list[int]) -> int:
        return sum(counts) - counts[self._rank]

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows, sorted by expert, to their experts; returns the rows for this rank's experts.

        The result is sorted by expert too.
        """
        if self._group is None:
            return rows
        return exchange_rows(rows, self._group, self._to_experts, self._from_experts)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends the experts' results back; returns them in the order of the input of `dispatch`."""
        if self._group is None:
            return rows
        return exchange_rows(rows, self._group, self._from_experts, self._to_experts)

    def _to_experts(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        return moved_rows(rows, self._group, self._there, self._by_expert)

    def _from_experts(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        return moved_rows(rows[self._by_source], self._group, self._back)
