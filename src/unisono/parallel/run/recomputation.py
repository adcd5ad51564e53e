"""Backward passes that run parts of the forward pass again, as torch.utils.checkpoint does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.utils.checkpoint import CheckpointFunction

from unisono.parallel.divisible.interfaces import Balanced
from unisono.torch_backend import is_called_by


@contextmanager
def without_second_count(modules: Sequence[Balanced]) -> Iterator[None]:
    """Keeps the auxiliary losses of modules during a backward pass: a forward pass that runs again
    would add its loss a second time."""
    before = [each.auxiliary_loss for each in modules]
    try:
        yield
    finally:
        for module, loss in zip(modules, before, strict=True):
            module.auxiliary_loss = loss


def is_in_reentrant_backward() -> bool:
    """Returns True while `torch.utils.checkpoint(use_reentrant=True)` runs a forward pass again."""
    return is_called_by(CheckpointFunction.backward)
