"""A small recommendation model, its batches, and a comparison of its training with one process."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from parallel.worlds.layout_training import STEPS, compare_model
from unisono.parallel.recommendation import DLRM, DLRMShape, TablePlacement, TableShape
from unisono.parallel.run import ParallelRun

SAMPLES = 10


def small_tables() -> tuple[TableShape, ...]:
    """Returns tables with long and short bags. Their numbers of rows are not divisible by 2, 3 or
    4.
    """
    sizes = [(7, 3), (11, 1), (5, 2), (13, 5)]
    return tuple(TableShape(rows=rows, ids=ids) for rows, ids in sizes)


def small_shape(**changes: Any) -> DLRMShape:
    """Returns a model with sizes, such as the width of 5, that are not divisible by the number of
    ranks.
    """
    sizes: dict[str, Any] = {"counters": 3, "width": 5, "tables": small_tables()}
    return DLRMShape(**(sizes | {"bottom": (6,), "top": (7,)} | changes))


def click_batches(shape: DLRMShape, samples: int = SAMPLES) -> list[tuple[torch.Tensor, ...]]:
    """Returns the batches of all steps, with repeated ids, empty bags, and bags with gaps.

    In the second step, the first half of the samples has no ids.
    """
    generator = torch.Generator().manual_seed(8)
    found = []
    for step in range(STEPS):
        counts = torch.randint(0, 20, (samples, shape.counters), generator=generator)
        columns = [counts]
        for table in shape.tables:
            drawn = torch.rand(samples, table.ids, generator=generator) ** 3
            # small ids are frequent, so that bags repeat some of them
            ids = (drawn * table.rows).long()
            is_empty = torch.rand(samples, table.ids, generator=generator) < 0.3
            is_empty[0] = True
            if step == 1:
                is_empty[: samples // 2] = True
            columns.append(ids.masked_fill(is_empty, -1))
        clicks = torch.randint(0, 2, (samples,), generator=generator)
        found.append((torch.cat(columns, dim=1), clicks.double()))
    return found


def compare_dlrm(
    text: str,
    placement: TablePlacement | str,
    *,
    microbatches: int = 1,
    samples: int = SAMPLES,
    **changes: Any,
) -> ParallelRun:
    """Trains a model with a layout. Fails if the result differs from training in one process.

    Compares losses, norms and weights with that process, and the bytes of the last step with their
    closed forms.
    """
    shape = small_shape(**changes)
    return compare_model(
        text,
        lambda: DLRM(shape, seed=2, placement=placement, samples=samples),
        lambda: functional.binary_cross_entropy_with_logits,
        click_batches(shape, samples),
        microbatches=microbatches,
        clip=0.01,
    )
