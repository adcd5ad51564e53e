"""Communication time of a training step, measured in two ways for every backend.

Both measurements run after the training. They use the trained models and do not change them. The
backends alternate, so that a drift of the machine's speed affects all backends equally.

*Exchange alone*: the ranks start one asynchronous sum for each of DDP's gradient buckets and wait
for all sums. The buckets have exactly DDP's sizes. No computation runs, so nothing can hide the
exchange.

*Added to a step*: the time of forward and backward passes with the exchange, minus the time of the
same passes under `no_sync`, which compute the same without an exchange. The difference is the time
that communication adds despite overlap, including the processor time of the communication.

A measurement starts when the first rank leaves a barrier, which is the same barrier for every
backend, and ends when the last rank is done. So passes with and without exchange both include the
slowest rank, and the time that ranks wait for each other on too few cores, which no backend can
avoid. An exchange is short compared with the differences between ranks at the barrier, so several
exchanges follow one barrier.
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

from unisono.train.replicas import Replica
from unisono.train.task import Task

EXCHANGES_PER_GROUP = 5
PASSES_PER_GROUP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Times of one backend in seconds: a mean for each group of exchanges, a time for each pass."""

    bucket_bytes: list[int]
    exchange_s: list[float]
    synced_s: list[float]
    unsynced_s: list[float]


def measure(
    replicas: Sequence[Replica], task: Task, batch: Sequence[torch.Tensor], groups: int
) -> list[Communication]:
    """Returns one result per replica. Collective: all ranks call it with the same arguments."""
    buckets = gradient_buckets(replicas[0].module, task, batch)
    exchanges = [_GradientExchange(buckets, replica) for replica in replicas]
    synced = [_Pass(replica, task, batch, is_synced=True) for replica in replicas]
    unsynced = [_Pass(replica, task, batch, is_synced=False) for replica in replicas]
    exchanges_s = _time_alternately(exchanges, groups)
    passes_s = _time_alternately([*synced, *unsynced], groups * PASSES_PER_GROUP)
    return [
        Communication(
            bucket_bytes=[bucket.numel() * bucket.element_size() for bucket in buckets],
            exchange_s=[time_s / EXCHANGES_PER_GROUP for time_s in exchanges_s[index]],
            synced_s=passes_s[index],
            unsynced_s=passes_s[len(replicas) + index],
        )
        for index in range(len(replicas))
    ]


def gradient_buckets(
    model: nn.Module, task: Task, batch: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns tensors with the sizes and types of DDP's gradient buckets, in DDP's order."""
    seen: list[torch.Tensor] = []
    model_copy = DistributedDataParallel(copy.deepcopy(model))
    # The hook is a lambda, since DDP requires that annotations of a hook are types. The
    # annotations of `_record_bucket` are strings; a lambda has none.
    model_copy.register_comm_hook(
        seen, lambda seen, bucket: _record_bucket(seen, bucket.index(), bucket.buffer())
    )
    # DDP rearranges its buckets after the first pass, in the order in which gradients arrived.
    for _ in range(2):
        task.loss(model_copy, batch).backward()  # type: ignore[no-untyped-call]
    return seen


def _record_bucket(
    seen: list[torch.Tensor], index: int, bucket: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Records a bucket. This communication hook of DDP does not exchange the bucket."""
    if index == 0:
        seen.clear()
    seen.append(torch.empty_like(bucket))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket)
    return done


class _Action(Protocol):
    def __call__(self) -> None:
        """Runs the part of the action whose time is measured."""

    def finish(self) -> None:
        """Runs the part of the action that is not timed."""


class _GradientExchange:
    """Sums all gradient buckets over the ranks, as DDP does, `EXCHANGES_PER_GROUP` times."""

    def __init__(self, buckets: Sequence[torch.Tensor], replica: Replica) -> None:
        self._buckets = buckets
        self._replica = replica
        self._expected = float(dist.get_world_size() ** EXCHANGES_PER_GROUP)
        self._fill()

    def __call__(self) -> None:
        for _ in range(EXCHANGES_PER_GROUP):
            self._replica.exchange(self._buckets)

    def finish(self) -> None:
        if not all(bool((bucket == self._expected).all()) for bucket in self._buckets):
            raise RuntimeError("the backend summed the gradient buckets to a wrong value")
        self._fill()

    def _fill(self) -> None:
        for bucket in self._buckets:
            bucket.fill_(1.0)


class _Pass:
    """A forward and backward pass, with or without the exchange of gradients."""

    def __init__(
        self,
        replica: Replica,
        task: Task,
        batch: Sequence[torch.Tensor],
        *,
        is_synced: bool,
    ) -> None:
        self._replica = replica
        self._task = task
        self._batch = batch
        self._is_synced = is_synced

    def __call__(self) -> None:
        with contextlib.nullcontext() if self._is_synced else self._replica.no_sync():
            self._task.loss(self._replica.wrapped, self._batch).backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        self._replica.module.zero_grad()


def _time_alternately(actions: Sequence[_Action], repetitions: int) -> list[list[float]]:
    """Returns the seconds of each action in each repetition.

    The time runs from the start of the first rank to the end of the last rank.
    """
    starts_s, ends_s = (
        torch.zeros(len(actions), repetitions + 1, dtype=torch.float64) for _ in "12"
    )
    # The first repetition is a warm-up. Every second repetition runs in reverse order, so that no
    # action always follows the same action.
    for repetition in range(repetitions + 1):
        order = range(len(actions))
        for index in order if repetition % 2 == 0 else reversed(order):
            dist.barrier()
            # All ranks are on one host, so they share this clock.
            starts_s[index, repetition] = time.monotonic()
            actions[index]()
            ends_s[index, repetition] = time.monotonic()
            actions[index].finish()
    dist.all_reduce(starts_s, op=dist.ReduceOp.MIN)
    dist.all_reduce(ends_s, op=dist.ReduceOp.MAX)
    elapsed_s: list[list[float]] = (ends_s - starts_s)[:, 1:].tolist()
    return elapsed_s
