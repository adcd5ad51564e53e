"""Exchange of rows between the ranks of a host: each rank puts its rows into the windows of the
others.

All ranks know how many rows every rank sends to every other rank. So a rank puts its rows where
the receiver reads them, adds a header and a signal, and needs no answer. The rows are copied once
before the receiver reads them; an all_to_all copies them twice.

The window of a rank has two halves, which the exchanges use in turn. A rank sends its signals of
exchange i after it has read the rows of exchange i - 1. Exchange i + 1 writes to the half of
exchange i - 1, and a rank begins it only after it has the signals of exchange i from all peers. So
no rank overwrites rows that a peer still reads.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from unisono.errors import AbortedError, CommunicationError, MismatchError
from unisono.torch_backend.convert import movable
from unisono.torch_backend.group_base import GroupBase, as_one_call
from unisono.torch_backend.heap_tensor import heap_tensor
from unisono.torch_backend.private import hide_from_dynamo

if TYPE_CHECKING:
    from unisono.communicator import Window

Table = Sequence[Sequence[int]]
"""The number of rows from each rank to each rank: `table[source][destination]`."""

_HEADER = 4
"""Numbers before the rows of an exchange, for each source: number of the exchange, rows, bytes of
a row, type."""
_NUMBER_BYTES = 8
_LINE_BYTES = 64
_LEAST_BYTES = 64 << 10


def row_exchange_of(group: object) -> RowExchange | None:
    """Returns the exchange of a process group, which is made at the first call. None if the group
    has no CPU communicator of unisono, or if its ranks share no memory.
    """
    if not isinstance(group, GroupBase) or not group.communicator.shares_memory:
        return None
    if group.row_exchange is None:
        group.row_exchange = RowExchange(group)
    found: RowExchange = group.row_exchange
    return found


class RowExchange:
    """The windows of one process group, for exchanges of rows.

    All ranks make the same exchanges in the same order, as for a collective.
    """

    def __init__(self, group: GroupBase) -> None:
        self._group = weakref.ref(group)  # the group keeps this object
        self._comm = group.communicator
        self._exchanges = 0
        self._half_bytes = 0
        self._head_bytes = -(-_HEADER * _NUMBER_BYTES * self._comm.size // _LINE_BYTES)
        self._head_bytes *= _LINE_BYTES
        self._window: Window | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def header_bytes(self) -> int:
        """Bytes that a rank sends to every other rank in an exchange, besides the rows."""
        return _HEADER * _NUMBER_BYTES

    def move(self, rows: torch.Tensor, table: Table) -> torch.Tensor:
        """Sends the first `table[rank][0]` of `rows` to rank 0, the next to rank 1, and so on.

        Returns the arriving rows in rank order. They are valid until the next exchange, so the
        caller copies them. `rows` is a CPU tensor with `sum(table[rank])` rows. Collective.

        Raises `ValueError` for another number of rows, `MismatchError` if rows differ in width or
        type from those of another rank, and the errors of `Window.wait`. If only some ranks need a
        larger window for their wider rows, the exchange ends with a timeout.
        """
        group = self._group()
        if group is None:
            raise AbortedError("exchange of rows: the process group no longer exists")
        moved: torch.Tensor = as_one_call(
            group,
            "all_to_all",
            [rows],
            lambda: self._moved_or_aborted(rows.detach(), table),
        )
        return moved

    def _moved_or_aborted(self, rows: torch.Tensor, table: Table) -> torch.Tensor:
        """Returns `_moved`. An error of this rank ends the group, because the others wait for its
        rows.
        """
        try:
            return self._moved(rows, table)
        except CommunicationError:
            raise
        except Exception as error:
            self._comm.abort(f"exchange of rows on rank {self._comm.rank}: {error}")
            raise

    def _moved(self, rows: torch.Tensor, table: Table) -> torch.Tensor:
        ranks, me = self._comm.size, self._comm.rank
        if len(rows) != sum(table[me]):
            raise ValueError(f"rows: expected {sum(table[me])}, as the table says, not {len(rows)}")
        width = rows.shape[1:]
        row_bytes = math.prod(width) * rows.element_size()
        window = self._roomy_window(_most_rows(table) * row_bytes)
        start = self._exchanges % 2 * self._half_bytes
        self._exchanges += 1
        data = movable(rows.contiguous()).reshape(-1).view(torch.uint8)
        ends = list(accumulate((count * row_bytes for count in table[me]), initial=0))
        kind = zlib.crc32(str(rows.dtype).encode())
        for step in range(ranks):
            to = (me + step) % ranks
            ahead = sum(table[source][to] for source in range(me))
            header = np.array([self._exchanges, table[me][to], row_bytes, kind])
            if table[me][to]:
                at = start + self._head_bytes + ahead * row_bytes
                window.put(data[ends[to] : ends[to + 1]], to, at)
            window.put(header.view(np.uint8), to, start + me * _HEADER * _NUMBER_BYTES, signal=True)
        for source in range(ranks):
            window.wait(source)
        arriving = [table[source][me] for source in range(ranks)]
        self._check_headers(start, arriving, row_bytes, kind)
        first, count = start + self._head_bytes, sum(arriving)
        found = self._memory[first : first + count * row_bytes]
        return found.view(rows.dtype).view(count, *width)

    def _roomy_window(self, nbytes: int) -> Window:
        """Returns a window whose halves have room for `nbytes` of rows. Collective if the window
        must grow. All ranks find this from the same table and the same bytes of a row.
        """
        needed = self._head_bytes + nbytes
        if self._window is not None and needed <= self._half_bytes:
            return self._window
        if self._window is not None:
            self._window.close()
            self._window = None
        half_bytes = 1 << (max(needed, _LEAST_BYTES) - 1).bit_length()
        self._memory = heap_tensor(self._comm, (2 * half_bytes,), torch.uint8)
        self._half_bytes = half_bytes
        self._window = self._comm.window(self._memory)
        return self._window

    def _check_headers(self, start: int, arriving: list[int], row_bytes: int, kind: int) -> None:
        nbytes = _HEADER * _NUMBER_BYTES * len(arriving)
        found = self._memory[start : start + nbytes].view(torch.int64).view(-1, _HEADER)
        expected = [[self._exchanges, count, row_bytes, kind] for count in arriving]
        if (headers := found.tolist()) == expected:
            return
        source = next(i for i, header in enumerate(headers) if header != expected[i])
        text = (
            f"exchange of rows: rank {source} sent {_text(headers[source])}, but rank "
            f"{self._comm.rank} expected {_text(expected[source])}: all ranks must make the same "
            "exchanges, of rows of one type and width"
        )
        self._comm.abort(text)
        raise MismatchError(text)


def _most_rows(table: Table) -> int:
    """Returns the most rows that arrive at a rank."""
    return max(map(sum, zip(*table, strict=True)))


def _text(header: list[int]) -> str:
    exchange, rows, row_bytes, kind = header
    return f"{rows} rows of {row_bytes} bytes (type {kind:08x}) in exchange {exchange}"


hide_from_dynamo(RowExchange)
