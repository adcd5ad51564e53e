"""Synthetic click logs: counters, ids that follow a power law, and clicks to predict."""

from __future__ import annotations

import math

import torch

from unisono.parallel import CounterRandom, DLRMShape, TableShape

CLICK_SHAPE = DLRMShape(
    counters=13,
    width=16,
    tables=tuple(
        TableShape(rows=rows, ids=ids)
        for rows, ids in (
            *((15_000, 1), (30_000, 50), (4000, 1), (3000, 2), (2000, 1), (1500, 1)),
            *((1000, 4), (500, 1), (50, 1), (20, 1), (10, 1), (4, 1)),
        )
    ),
    bottom=(64, 32),
    top=(64, 32),
)
"""Shape of the task's model: 13 counters as in Criteo's logs, and ids of users, histories and
places."""
SAMPLES = 16_384

_EXPONENT = 1.1
_EMPTY_SHARE = 0.1
_COUNTER_SCALE = 1.5
_LOGIT_SCALE = 2.0
_HASH = 2_654_435_761


def click_log(shape: DLRMShape, *, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs of a `DLRM`, (samples, columns), and clicks 0 or 1, (samples,).

    Id number k of a table is drawn with a probability proportional to about k^-1.1. Ids are
    scrambled, so frequent ids are spread over the table. A tenth of the bags is empty; the other
    bags have 1 to `ids` ids. Hidden weights of ids and counters determine the probability of a
    click.

    >>> shape = DLRMShape(counters=2, width=4, tables=(TableShape(rows=9),), bottom=(), top=())
    >>> inputs, clicks = click_log(shape, samples=100, seed=0)
    >>> inputs.shape, sorted(set(clicks.tolist()))
    (torch.Size([100, 3]), [0.0, 1.0])
    """
    random = CounterRandom(seed)
    counts = (random.normal("counters", (samples, shape.counters)) * _COUNTER_SCALE).exp().long()
    logits = counts.double().log1p() @ random.normal("counter weights", (shape.counters,))
    logits = logits - logits.mean()
    columns = [counts]
    for number, table in enumerate(shape.tables):
        places = _places(random, f"table {number}", table, samples)
        weights = random.normal(f"table {number} weights", (table.rows,))
        is_id = places >= 0
        sums = (weights[places.clamp(min=0)] * is_id).sum(1)
        logits = logits + sums / is_id.sum(1).clamp(min=1).sqrt()
        columns.append(places)
    scale = _LOGIT_SCALE / logits.std()
    clicks = random.uniform("clicks", (samples,)) < torch.sigmoid(logits * scale)
    return torch.cat(columns, dim=1), clicks.to(torch.get_default_dtype())


def _places(random: CounterRandom, site: str, table: TableShape, samples: int) -> torch.Tensor:
    """Returns the ids of a table, (samples, ids), padded with -1."""
    drawn = random.uniform(f"{site} ids", (samples, table.ids))
    power = 1 - _EXPONENT
    numbers = ((((table.rows + 1) ** power - 1) * drawn + 1) ** (1 / power)).long() - 1
    step = next(each for each in range(_HASH, 2 * _HASH) if math.gcd(each, table.rows) == 1)
    ids: torch.Tensor = numbers.clamp(max=table.rows - 1) * step % table.rows
    share = random.uniform(f"{site} lengths", (samples, 1))
    lengths = ((share - _EMPTY_SHARE) / (1 - _EMPTY_SHARE) * table.ids).ceil()
    return ids.masked_fill(torch.arange(table.ids) >= lengths, -1)
