"""The first microbatch of an example, with which a pipeline finds its stages."""

from __future__ import annotations

from typing import Any

from unisono.parallel.run.batch_tree import BatchTree
from unisono.planner import Layout


def first_microbatch(
    example: Any, layout: Layout, *, microbatches: int, is_local: bool
) -> BatchTree:
    """Returns the first microbatch of an example. Raises `ValueError` if it cannot be divided."""
    batch = BatchTree.of(example)
    dp = 1 if is_local else layout.dp
    parts = microbatches * dp
    if batch.samples == 0 or batch.samples % parts:
        raise ValueError(
            f"example: expected a multiple of microbatches x dp = {microbatches} x {dp} = {parts} "
            f"samples, got {batch.samples}"
        )
    first = batch.with_tensors([each[: batch.samples // parts] for each in batch.tensors])
    return BatchTree.of(first)
