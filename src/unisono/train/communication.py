"""How much of a step is communication. The same two measurements for every backend.

Both come after the training, on the trained models, which they do not change. The backends take
turns, so that a machine whose speed drifts hits all of them alike.

*Exchange alone*: the ranks start one asynchronous sum for each of DDP's gradient buckets and wait
for all of them. The buckets have exactly the sizes that DDP uses. There is no other work, so
nothing can hide the exchange.

*Added to a step*: forward and backward passes with the exchange, less the same passes under
`no_sync`, which do the same arithmetic and exchange nothing. The difference is what communication
adds to a step after overlap, including what it takes from the processors.

Each time is that of a group of a few exchanges or passes in a row, from a barrier (the same for
every backend) to its end, divided by their number, so that the unequal moments at which the ranks
leave the barrier weigh little. Then the slowest rank counts.
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
class Subject:
    """What is measured: a model that exchanges its gradients over a group."""

    ddp: DistributedDataParallel
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Seconds for one exchange or one pass, an entry for each group, of the slowest rank."""

    bucket_bytes: list[int]
    exchange_s: list[float]
    synced_s: list[float]
    unsynced_s: list[float]


def measure(
    subjects: Sequence[Subject], task: Task, batch: Sequence[torch.Tensor], groups: int
) -> list[Communication]:
    """One result for each subject. Collective: all ranks call it with the same arguments."""
    buckets = gradient_buckets(subjects[0].ddp.module, task, batch)
    exchanges_s = _time_in_turns(
        [_exchange(buckets, subject.group) for subject in subjects], EXCHANGES_PER_GROUP, groups
    )
    passes_s = _time_in_turns(
        [
            one_pass
            for subject in subjects
            for one_pass in (_synced_pass(subject.ddp, task, batch), _unsynced_pass(subject.ddp, task, batch))
        ],
        PASSES_PER_GROUP,
        groups,
    )
    return [
        Communication(
            bucket_bytes=[bucket.numel() * bucket.element_size() for bucket in buckets],
            exchange_s=exchange_s,
            synced_s=synced_s,
            unsynced_s=unsynced_s,
        )
        for exchange_s, synced_s, unsynced_s in zip(
            exchanges_s, passes_s[0::2], passes_s[1::2], strict=True
        )
    ]


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


def _exchange(buckets: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Callable[[], None]:
    """Sums the buckets as DDP does. Averages, so that the values stay and can be checked."""

    def exchange() -> None:
        works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
        for work in works:
            if work is not None:
                work.wait()

    return exchange
