"""How much of a step is communication. The same two measurements for every backend.

Both come after the training, on the trained model, which they do not change.

*Exchange alone*: all ranks meet at a barrier and then, a few times in a row, start one asynchronous
sum for each of DDP's gradient buckets and wait for all of them. The buckets have exactly the sizes
that DDP uses. There is no other work, so nothing can hide the exchange.

*Added to a step*: groups of forward and backward passes with the exchange alternate with groups
under `no_sync`, which do the same arithmetic and exchange nothing. The difference of neighbours is
what communication adds to a step after overlap, including what it takes from the processors.
Alternation makes a machine whose speed drifts hit both sides alike.

Each time is of a group, from the barrier to its end, divided by the group's length, so that the
unequal moments at which the ranks leave the barrier weigh little; then the slowest rank counts.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.train.task import Task

EXCHANGES_PER_GROUP = 5
PASSES_PER_GROUP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Seconds for one exchange or one pass, an entry for each group, of the slowest rank."""

    bucket_bytes: list[int]
    exchange_s: list[float]
    synced_s: list[float]
    unsynced_s: list[float]


def measure(
    ddp: DistributedDataParallel, task: Task, batch: Sequence[torch.Tensor], groups: int
) -> Communication:
    """Collective: every rank calls it, with the same number of groups."""
    buckets = gradient_buckets(ddp.module, task, batch)
    synced_s, unsynced_s = _time_passes(ddp, task, batch, groups)
    return Communication(
        bucket_bytes=[bucket.numel() * bucket.element_size() for bucket in buckets],
        exchange_s=_time_exchange(buckets, groups),
        synced_s=synced_s,
        unsynced_s=unsynced_s,
    )


def gradient_buckets(
    model: nn.Module, task: Task, batch: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Tensors of the sizes and types that DDP exchanges for this model, in its order."""
    seen: list[torch.Tensor] = []
    shadow = DistributedDataParallel(copy.deepcopy(model))
    # A lambda, as DDP compares a hook's annotations by identity and ours are strings.
    shadow.register_comm_hook(
        seen, lambda seen, bucket: _note(seen, bucket.index(), bucket.buffer())
    )
    # DDP arranges its buckets anew after the first pass, in the order in which gradients came.
    for _ in range(2):
        task.loss(shadow, batch).backward()  # type: ignore[no-untyped-call]
    return seen


def _note(
    seen: list[torch.Tensor], index: int, bucket: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that exchanges nothing."""
    if index == 0:
        seen.clear()
    seen.append(torch.empty_like(bucket))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket)
    return done


def _time_exchange(buckets: Sequence[torch.Tensor], groups: int) -> list[float]:
    def exchange() -> None:
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in works:
            if work is not None:
                work.wait()

    expected = float(dist.get_world_size() ** EXCHANGES_PER_GROUP)
    times_s = []
    for _ in range(groups + 1):
        for bucket in buckets:
            bucket.fill_(1.0)
        times_s.append(_time_group(exchange, EXCHANGES_PER_GROUP))
        if not all(bool((bucket == expected).all()) for bucket in buckets):
            raise RuntimeError("the backend summed the gradient buckets to a wrong value")
    return _slowest(times_s[1:])


def _time_passes(
    ddp: DistributedDataParallel, task: Task, batch: Sequence[torch.Tensor], groups: int
) -> tuple[list[float], list[float]]:
    def one_pass() -> None:
        ddp.zero_grad()
        task.loss(ddp, batch).backward()  # type: ignore[no-untyped-call]

    synced_s: list[float] = []
    unsynced_s: list[float] = []
    for with_exchange in _alternating(groups):
        with contextlib.nullcontext() if with_exchange else ddp.no_sync():
            elapsed_s = _time_group(one_pass, PASSES_PER_GROUP)
        (synced_s if with_exchange else unsynced_s).append(elapsed_s)
    ddp.zero_grad()
    # The first group of each kind warms up.
    return _slowest(synced_s[1:]), _slowest(unsynced_s[1:])


def _alternating(groups: int) -> Iterator[bool]:
    """Yes no, no yes, yes no ...: neither side always comes second."""
    for pair in range(groups + 1):
        yield from (True, False) if pair % 2 == 0 else (False, True)


def _time_group(action: Callable[[], None], times: int) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    for _ in itertools.repeat(None, times):
        action()
    return (time.perf_counter() - start_s) / times


def _slowest(times_s: list[float]) -> list[float]:
    """The largest over ranks, entry by entry."""
    largest = torch.tensor(times_s, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()
