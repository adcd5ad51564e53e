"""Cases with one unusual thing each, in the plainest layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from random_models.blocks import BLOCKS
from random_models.case import Case
from random_models.habits import HABITS
from random_models.losses import LOSSES
from random_models.models import CONTAINERS
from random_models.optimizers import OPTIMIZERS

_PLACES = (
    Case(layout="dp=2", microbatches=2),
    Case(layout="dp=2,zero=3", microbatches=2),
    Case(layout="pp=2", microbatches=2),
    Case(layout="tp=2"),
    Case(layout="pp=2", microbatches=2, example=True),
)
"""Layouts and options in which every unusual thing is tried."""


def singles() -> Iterator[Case]:
    """Yields the cases: blocks and containers in all layouts, others in the first three."""
    for place in _PLACES:
        for name in BLOCKS:
            yield replace(place, blocks=("linear_pair", name, "tanh"))
        for container in CONTAINERS:
            yield replace(place, container=container, blocks=("linear_pair", "mlp"))
    for place in _PLACES[:3]:
        plain = replace(place, blocks=("linear_pair", "tanh"))
        for name, kind in LOSSES.items():
            head = "channels" if kind.channels else "positions"
            for ignored in ("some", "half") if kind.targets == "classes" else ("none",):
                yield replace(plain, loss=name, head=head, ignored=ignored)
        yield from (replace(plain, optimizer=name) for name in OPTIMIZERS)
        yield from (
            replace(plain, habit=name, loss="tempered" if "loss" in name else "cross_entropy")
            for name in HABITS
        )
        yield replace(plain, head="masked", ignored="half")
        yield replace(plain, head="pooled", ignored="half")
        yield replace(plain, autocast=True)
        yield replace(plain, batches=((8, 4), (16, 6), (8, 3)))
        yield replace(plain, batches=((7, 4), (5, 4)))
