"""Replicas of a model whose gradients are averaged by torch's DDP or by the controller.

Both DDP and the controller average during the backward pass. Both kinds of replica have the same
interface, so that the training loop and the measurements are equal for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.parallel import data_parallel
from unisono.train.settings import CONTROLLER


class Replica(Protocol):
    """A model on one rank, whose parameters are equal on all ranks of `group` after each step."""

    group: dist.ProcessGroup

    @property
    def module(self) -> nn.Module:
        """The model itself."""

    @property
    def wrapped(self) -> nn.Module:
        """The module to call in training, which also averages the gradients."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes do not average gradients."""

    def exchange(self, buckets: Sequence[torch.Tensor]) -> None:
        """Sums each tensor over the ranks, in place; all sums run at the same time."""

    def close(self) -> None:
        """Ends the exchange of gradients."""


def make_replica(name: str, model: nn.Module, group: dist.ProcessGroup) -> Replica:
    """Returns the replica of a model. `name`: `CONTROLLER`, or a backend for DDP."""
    if name == CONTROLLER:
        return _ControllerReplica(model, group)
    return _DDPReplica(model, group)


class _DDPReplica:
    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.group = group
        self.wrapped = DistributedDataParallel(model, process_group=group)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.wrapped.module
        return module

    def no_sync(self) -> AbstractContextManager[None]:
        return self.wrapped.no_sync()

    def exchange(self, buckets: Sequence[torch.Tensor]) -> None:
        works = [dist.all_reduce(bucket, group=self.group, async_op=True) for bucket in buckets]
        for work in works:
            if work is not None:
                work.wait()

    def close(self) -> None:
        """Does nothing, since DDP has nothing to close."""


class _ControllerReplica:
    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.group = group
        self.wrapped = data_parallel(model, group.communicator)  # type: ignore[attr-defined]

    @property
    def module(self) -> nn.Module:
        return self.wrapped.module

    def no_sync(self) -> AbstractContextManager[None]:
        return self.wrapped.no_sync()

    def exchange(self, buckets: Sequence[torch.Tensor]) -> None:
        reduce = self.wrapped.controller.all_reduce
        handles = [reduce(f"bucket {i}", bucket) for i, bucket in enumerate(buckets)]
        for handle in handles:
            handle.wait()

    def close(self) -> None:
        self.wrapped.close()
