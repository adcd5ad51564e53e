"""Backward passes that run parts of the forward pass again, as torch.utils.checkpoint does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from unisono.parallel.divisible import Balanced


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
