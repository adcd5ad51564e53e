"""Exchanges of rows by puts equal those of one process, and a rank that differs is told."""

from __future__ import annotations

import torch
from torch import distributed as dist

from unisono.errors import CommunicationError
from unisono.torch_backend.row_exchange import row_exchange_of
from worlds.outcomes import Outcome

RANKS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def rows_of(rank, count, width, dtype, seed):
    made = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-99, 99, (count, *width), generator=made).to(dtype)


def own_equals_one_process(world):
    """Tests tables of any numbers, rows of any width and type, and growth of the window."""
    exchange = row_exchange_of(dist.group.WORLD)
    assert row_exchange_of(dist.group.WORLD) is exchange
    n, me = world.size, world.rank
    drawn = torch.Generator().manual_seed(7)
    for seed in range(120):
        most = (0, 3, 40, 3000)[seed % 4]
        table = torch.randint(0, most + 1, (n, n), generator=drawn).tolist()
        dtype, width = DTYPES[seed % 3], ((), (5,), (2, 3), (64,))[seed % 5 % 4]
        given = [rows_of(r, sum(table[r]), width, dtype, seed) for r in range(n)]
        found = exchange.move(given[me], table).clone()
        parts = [torch.split(x, row) for x, row in zip(given, table, strict=True)]
        expected = torch.cat([parts[source][me] for source in range(n)])
        assert torch.equal(found, expected), (seed, table)
        assert found.dtype == dtype


def own_a_late_reader_sees_its_rows(world):
    """Tests that no rank overwrites rows that a slower rank has not read yet."""
    exchange = row_exchange_of(dist.group.WORLD)
    n, me = world.size, world.rank
    table = [[200] * n for _ in range(n)]
    for number in range(60):
        rows = torch.full((200 * n, 16), 100.0 * number + me)
        lent = exchange.move(rows, table)
        if number % n == me:
            torch.randn(400_000).sort()  # the other ranks are already in the next exchange
        for source in range(n):
            part = lent[200 * source : 200 * (source + 1)]
            assert (part == 100.0 * number + source).all(), (number, source)


def own_groups_have_their_own_windows(world):
    pair = dist.new_group([0, 2])
    if world.rank != 1:
        inner, outer = row_exchange_of(pair), row_exchange_of(dist.group.WORLD)
        assert inner is not outer
        me = dist.get_rank(pair)
        found = inner.move(torch.arange(3) + 10 * me, [[1, 2], [2, 1]])
        assert found.tolist() == ([0, 10, 11] if me == 0 else [1, 2, 12])


def own_a_row_of_another_type_is_told(world):
    group = dist.new_group(list(range(world.size)))
    dtype = torch.float32 if world.rank else torch.int32
    table = [[2] * world.size for _ in range(world.size)]
    try:
        row_exchange_of(group).move(torch.ones(2 * world.size, 3, dtype=dtype), table)
    except CommunicationError as error:  # its own, or that of a rank that has told the group first
        assert "exchange of rows" in str(error), error
        assert "all ranks must make the same exchanges" in str(error), error
    else:
        raise AssertionError("a mismatch was not told")


def own_a_wrong_number_of_rows_is_told(world):
    group = dist.new_group(list(range(world.size)))
    table = [[2] * world.size for _ in range(world.size)]
    rows = torch.ones(2 * world.size - (world.rank == 1), 3)
    try:
        row_exchange_of(group).move(rows, table)
    except ValueError as error:
        assert world.rank == 1 and "rows: expected 6" in str(error), error
    except CommunicationError as error:
        assert world.rank != 1 and "on rank 1: rows: expected 6" in str(error), error
    else:
        raise AssertionError("a wrong number of rows was not told")


def test_row_exchange(outcome: Outcome) -> None:
    outcome.require_success()
