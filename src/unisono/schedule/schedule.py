"""Schedule: an ordered, immutable list of transfers, independent of the message size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collective import Collective
from unisono.schedule.transfer import Column, Columns, Transfer, Transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Transfers, ordered by round, that perform a collective.

    `transfers` may be any sequence. The schedule stores the transfers as columns (see `columns`)
    and presents them as a sequence of `Transfer`. Locations `num_chunks .. num_chunks + scratch -
    1` of each rank are private and empty at the start.

    Raises `ScheduleError` for a number that does not fit in 32 bits.
    """

    collective: Collective
    algorithm: str
    transfers: Sequence[Transfer]
    scratch: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "transfers", Transfers.of(self.transfers))

    @property
    def columns(self) -> Columns:
        """All transfers, field by field, as read-only arrays of one length."""
        assert isinstance(self.transfers, Transfers)
        return self.transfers.columns

    @property
    def num_rounds(self) -> int:
        """Number of rounds, including empty rounds."""
        return int(self.columns.round.max(initial=-1)) + 1

    @property
    def num_locations(self) -> int:
        """Number of locations of each rank: first the logical chunks, then scratch."""
        return self.collective.num_chunks + self.scratch

    def rounds(self) -> Iterator[tuple[int, Sequence[Transfer]]]:
        """Yields each non-empty round with its transfers. Transfers must be ordered by round."""
        for number, where in self.columns.rounds():
            yield number, self.transfers[where]

    def chunks_sent(self, rank: int) -> int:
        """Returns the number of chunks that the rank sends to other ranks. The size of a chunk is
        the size of a piece divided by the number of parts.
        """
        return _moved(self.columns, self.columns.src == rank)

    def chunks_received(self, rank: int) -> int:
        """Returns the number of chunks that the rank receives from other ranks."""
        return _moved(self.columns, self.columns.dst == rank)

    def chunks_sent_by_rank(self) -> NDArray[np.int64]:
        """Returns the number of chunks that each rank sends to other ranks, with shape (ranks,)."""
        return self._by_rank(self.columns.src)

    def chunks_received_by_rank(self) -> NDArray[np.int64]:
        """Returns the number of chunks that each rank receives from other ranks, with shape
        (ranks,).
        """
        return self._by_rank(self.columns.dst)

    def _by_rank(self, side: Column) -> NDArray[np.int64]:
        remote = self.columns.src != self.columns.dst
        total = np.zeros(self.collective.ranks, np.int64)
        np.add.at(total, side[remote], self.columns.count[remote])
        return total


def _moved(columns: Columns, which: NDArray[np.bool_]) -> int:
    return int(columns.count[which & (columns.src != columns.dst)].sum(dtype=np.int64))
