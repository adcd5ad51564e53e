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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.train.task import Task


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
    exchanges = [_Exchange(buckets, subject.group) for subject in subjects]
    synced = [_Pass(subject.ddp, task, batch, is_synced=True) for subject in subjects]
    unsynced = [_Pass(subject.ddp, task, batch, is_synced=False) for subject in subjects]
    exchanges_s = _time_in_turns(exchanges, groups)
    passes_s = _time_in_turns([*synced, *unsynced], groups)
    return [
        Communication(
            bucket_bytes=[bucket.numel() * bucket.element_size() for bucket in buckets],
            exchange_s=exchanges_s[index],
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
        """Do a group of it."""

    def finish(self) -> None:
        """What belongs to the group and is not timed."""

    @property
    def count(self) -> int:
        """How often one group does it."""
        ...


class _Exchange:
    """All gradient buckets, summed as DDP sums them."""

    count = 5

    def __init__(self, buckets: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._buckets = buckets
        self._group = group
        self._expected = float(dist.get_world_size() ** self.count)
        self._fill()

    def __call__(self) -> None:
        for _ in range(self.count):
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

    count = 4

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
            for _ in range(self.count):
                self._ddp.zero_grad()
                self._task.loss(self._ddp, self._batch).backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        self._ddp.zero_grad()


def _time_in_turns(actions: Sequence[_Action], groups: int) -> list[list[float]]:
    """For each action the seconds of one, by group, of the slowest rank."""
    times_s: list[list[float]] = [[] for _ in actions]
    # The first turn warms up. Every other one goes backwards: none always follows the same one.
    for turn in range(groups + 1):
        order = range(len(actions))
        for index in order if turn % 2 == 0 else reversed(order):
            times_s[index].append(_time_group(actions[index]))
    largest = torch.tensor(times_s, dtype=torch.float64)[:, 1:].contiguous()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    slowest_s: list[list[float]] = largest.tolist()
    return slowest_s


def _time_group(action: _Action) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    action()
    elapsed_s = time.perf_counter() - start_s
    action.finish()
    return elapsed_s / action.count
