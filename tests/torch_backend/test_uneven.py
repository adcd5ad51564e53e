"""Lists of tensors whose lengths disagree. Every rank gets an error within a second. If all ranks'
lists are wrong, the group stays usable.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import distributed as dist

from time_limits import limit_s
from unisono.errors import CommunicationError
from unisono.torch_backend import all_gather_single

pytestmark = pytest.mark.torch
RANKS = 3
DETECTION_S = 1.0


def test_uneven(outcome):
    outcome.require_success()


def require_told(world, call, culprit, reason):
    """Asserts that `call(group)` fails on every rank within a second. On the rank with the wrong
    list, the error may be ValueError.
    """
    group = dist.new_group()
    dist.barrier(group)
    started = time.monotonic()
    kind = (ValueError, CommunicationError) if world.rank == culprit else CommunicationError
    with pytest.raises(kind, match=reason):
        call(group)
    assert time.monotonic() - started < limit_s(DETECTION_S)
    if world.rank != culprit:
        with pytest.raises(CommunicationError, match=f"(rank|root) {culprit}"):
            dist.barrier(group)


def pieces(*lengths):
    return [torch.empty(length) for length in lengths]


def own_gather_with_a_wrong_output_at_the_root(world):
    def call(group):
        places = pieces(4, 5, 4) if world.rank == 0 else None
        dist.gather(torch.ones(4), places, 0, group=group)

    require_told(world, call, 0, "one length")


def own_scatter_of_uneven_pieces(world):
    def call(group):
        dist.scatter(torch.ones(4), pieces(4, 5, 4) if world.rank == 1 else None, 1, group=group)

    require_told(world, call, 1, "share of rank 1")


def own_all_gather_where_one_rank_has_less(world):
    def call(group):
        dist.all_gather(pieces(8, 8, 8), torch.ones(7 if world.rank == 2 else 8), group=group)

    require_told(world, call, 2, "7 elements")


def own_all_gather_into_tensor_where_one_rank_has_less(world):
    def call(group):
        mine = torch.ones(7 if world.rank == 2 else 8)
        all_gather_single(torch.empty(24), mine, group=group)

    require_told(world, call, 2, "needs 21")


def own_reduce_scatter_where_one_rank_expects_more(world):
    def call(group):
        mine = torch.ones(9 if world.rank == 1 else 8)
        dist.reduce_scatter(mine, pieces(8, 8, 8), group=group)

    require_told(world, call, 1, "9 elements")


def own_all_to_all_with_wrong_split_sizes(world):
    def call(group):
        splits = [1, 1, 2] if world.rank == 0 else [1, 1, 1]
        dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 1, 1], splits, group=group)

    require_told(world, call, 0, "split sizes with the sum")


def require_mismatch(group, call):
    started = time.monotonic()
    with pytest.raises(CommunicationError):
        call()
    assert time.monotonic() - started < limit_s(DETECTION_S)
    with pytest.raises(CommunicationError):
        dist.barrier(group)


def own_all_to_all_where_two_ranks_disagree(world):
    for is_async in (False, True):
        group = dist.new_group()
        dist.barrier(group)
        outputs = pieces(2, 2, 3) if world.rank == 1 else pieces(2, 2, 2)

        def call(group=group, outputs=outputs, is_async=is_async):
            work = dist.all_to_all(outputs, pieces(2, 2, 2), group=group, async_op=is_async)
            if work is not None:
                work.wait()

        require_mismatch(group, call)


def own_all_to_all_where_a_rank_disagrees_with_itself(world):
    group = dist.new_group()
    dist.barrier(group)
    outputs = pieces(2, 3, 2) if world.rank == 1 else pieces(2, 2, 2)
    require_mismatch(group, lambda: dist.all_to_all(outputs, pieces(2, 2, 2), group=group))


def own_split_sizes_of_two_ranks_disagree(world):
    for is_async in (False, True):
        group = dist.new_group()
        dist.barrier(group)
        takes = [1, 2, 1] if world.rank == 2 else [1, 1, 1]

        def call(group=group, takes=takes, is_async=is_async):
            received = torch.empty(sum(takes), 4)
            work = dist.all_to_all_single(
                received, torch.ones(3, 4), takes, [1, 1, 1], group=group, async_op=is_async
            )
            if work is not None:
                work.wait()

        require_mismatch(group, call)


def shares(world, sender):
    """Returns the rows that `sender` sends to each rank."""
    return [(sender + 2 * rank) % 4 for rank in range(world.size)]


def sent(sender, receiver, rows, dtype):
    values = 100 * sender + 10 * receiver + torch.arange(rows * 4).reshape(rows, 4)
    return values.to(dtype)


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def own_all_to_all_of_any_form_on_any_rank(world):
    """Each rank passes its tensors in another form: strided, with rows of another width, or
    with gradients.
    """
    rank, ranks = world.rank, world.size
    for dtype in (torch.float32, torch.int64, torch.float8_e4m3fnuz, torch.bool, torch.complex64):
        for turn in range(ranks):
            sizes, takes = shares(world, rank), [shares(world, r)[rank] for r in range(ranks)]
            parts = [sent(rank, r, sizes[r], dtype) for r in range(ranks)]
            given, found = torch.cat(parts), torch.zeros(sum(takes), 4).to(dtype)
            form = (rank + turn) % ranks
            if form == 1:  # rows of another width
                found, takes = found.view(-1), [4 * rows for rows in takes]
            if form == 2 and dtype is not torch.float8_e4m3fnuz:  # strided
                given = given.t().contiguous().t()
                found = torch.zeros(4, sum(takes)).to(dtype).t()
            if dtype is torch.float32:
                given.requires_grad_()
            dist.all_to_all_single(found, given, takes, sizes)
            expected = [sent(r, rank, shares(world, r)[rank], dtype) for r in range(ranks)]
            assert bytes_of(found) == bytes_of(torch.cat(expected))


def own_all_to_all_within_one_tensor(world):
    rank, ranks = world.rank, world.size
    parts = [sent(rank, r, rank + r, torch.float32) for r in range(ranks)]
    tensor, sizes = torch.cat(parts), [rank + r for r in range(ranks)]
    dist.all_to_all_single(tensor, tensor, sizes, sizes)
    expected = torch.cat([sent(r, rank, rank + r, torch.float32) for r in range(ranks)])
    assert torch.equal(tensor, expected)


def own_all_to_all_where_one_rank_calls_something_else(world):
    group = dist.new_group()
    dist.barrier(group)

    def call():
        if world.rank == 2:
            dist.all_reduce(torch.ones(2), group=group)
        else:
            dist.all_to_all(pieces(2, 2, 2), pieces(2, 2, 2), group=group)

    require_mismatch(group, call)


def own_a_mistake_of_all_ranks_leaves_the_group_usable(world):
    group = dist.new_group()
    for _ in range(3):
        with pytest.raises(ValueError, match="its place in out"):
            dist.all_gather(pieces(8, 8, 8), torch.ones(7), group=group)
        with pytest.raises(ValueError, match="split sizes with the sum"):
            dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 1, 1], [2, 2, 2], group=group)
        with pytest.raises(ValueError, match="meta"):
            elsewhere = torch.ones(3, device="meta")
            dist.all_to_all_single(torch.empty(3), elsewhere, [1, 1, 1], [1, 1, 1], group=group)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [3.0, 3.0]


def own_unsupported_calls_name_the_problem(world):
    for tensor, reason in (
        (torch.ones(3, device="meta"), "meta"),
        (torch.ones(3, dtype=torch.complex64), "complex"),
        (torch.ones(1).expand(4), "share memory"),
    ):
        with pytest.raises(ValueError, match=reason):
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="bool"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
    dist.barrier()
