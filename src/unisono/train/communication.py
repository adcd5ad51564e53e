"""How much of a step is communication. The same two measurements for every backend.

Both come after the training, on the trained models, which they do not change. The backends take
turns, so that a machine whose speed drifts hits all of them alike.

*Exchange alone*: the ranks start one asynchronous sum for each of DDP's gradient buckets and wait
for all of them. The buckets have exactly the sizes that DDP uses. There is no other work, so
nothing can hide the exchange.

*Added to a step*: forward and backward passes with the exchange, less the same passes under
`no_sync`, which do the same arithmetic and exchange nothing. The difference is what communication
adds to a step after overlap, including what it takes from the processors.

The time is that from the moment when the first rank leaves a barrier, the same one for every
backend, to the end of the last rank. So both kinds of pass include the slowest rank, and the turns
that ranks take on too few cores, which no backend can save. An exchange is short beside the unequal
moments at which ranks leave the barrier: a few in a row share one.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """Seconds over all ranks: the mean of each group of exchanges, and every pass."""

    bucket_bytes: list[int]
    exchange_s: list[float]
    synced_s: list[float]
    unsynced_s: list[float]


def measure(
    subjects: Sequence[Subject], task: Task, batch: Sequence[torch.Tensor], groups: int
) -> list[Communication]:
    """One result for each subject. Collective: all ranks call it with the same arguments."""
    buckets = gradient_buckets(subjects[0].ddp.module, task, batch)
    exchanges = [_Exchange(buckets, subject.group) for subject in subjects]
    synced = [_Pass(subject.ddp, task, batch, is_synced=True) for subject in subjects]
    unsynced = [_Pass(subject.ddp, task, batch, is_synced=False) for subject in subjects]
    exchanges_s = _time_in_turns(exchanges, groups)
    passes_s = _time_in_turns([*synced, *unsynced], groups * PASSES_PER_GROUP)
    return [
        Communication(
            bucket_bytes=[bucket.numel() * bucket.element_size() for bucket in buckets],
            exchange_s=[time_s / EXCHANGES_PER_GROUP for time_s in exchanges_s[index]],
            synced_s=passes_s[index],
            unsynced_s=passes_s[len(subjects) + index],
        )
        for index in range(len(subjects))
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


class _Action(Protocol):
    def __call__(self) -> None:
        """What is timed."""

    def finish(self) -> None:
        """What belongs to it and is not timed."""


class _Exchange:
    """All gradient buckets, summed as DDP sums them, a few times."""

    def __init__(self, buckets: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._buckets = buckets
        self._group = group
        self._expected = float(dist.get_world_size() ** EXCHANGES_PER_GROUP)
        self._fill()

    def __call__(self) -> None:
        for _ in range(EXCHANGES_PER_GROUP):
            works = [
                dist.all_reduce(bucket, group=self._group, async_op=True)
                for bucket in self._buckets
            ]
            for work in works:
                if work is not None:
                    work.wait()

    def finish(self) -> None:
        if not all(bool((bucket == self._expected).all()) for bucket in self._buckets):
            raise RuntimeError("the backend summed the gradient buckets to a wrong value")
        self._fill()

    def _fill(self) -> None:
        for bucket in self._buckets:
            bucket.fill_(1.0)


class _Pass:
    """Forward and backward, with or without the exchange."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        task: Task,
        batch: Sequence[torch.Tensor],
        *,
        is_synced: bool,
    ) -> None:
        self._ddp = ddp
        self._task = task
        self._batch = batch
        self._is_synced = is_synced

    def __call__(self) -> None:
        with contextlib.nullcontext() if self._is_synced else self._ddp.no_sync():
            self._task.loss(self._ddp, self._batch).backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        self._ddp.zero_grad()


def _time_in_turns(actions: Sequence[_Action], turns: int) -> list[list[float]]:
    """For each action its seconds in every turn, from the first rank's start to the last's end."""
    starts_s, ends_s = (torch.zeros(len(actions), turns + 1, dtype=torch.float64) for _ in "12")
    # The first turn warms up. Every other one goes backwards: none always follows the same one.
    for turn in range(turns + 1):
        order = range(len(actions))
        for index in order if turn % 2 == 0 else reversed(order):
            dist.barrier()
            # The ranks share a host, hence this clock.
            starts_s[index, turn] = time.monotonic()
            actions[index]()
            ends_s[index, turn] = time.monotonic()
            actions[index].finish()
    dist.all_reduce(starts_s, op=dist.ReduceOp.MIN)
    dist.all_reduce(ends_s, op=dist.ReduceOp.MAX)
    elapsed_s: list[list[float]] = (ends_s - starts_s)[:, 1:].tolist()
    return elapsed_s
