"""The layers of each pipeline stage."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from unisono.planner.inputs.transformer import Transformer


class StageKind(NamedTuple):
    """Stages of equal load: their number of layers, how many of these layers are dense (without
    experts), and True for the last stage.
    """

    layers: int
    dense: int
    last: bool


@lru_cache(maxsize=4096)
def stage_layers(layers: int, stages: int, chunks: int = 1) -> tuple[int, ...]:
    """Returns the number of layers of each stage. The sum is `layers`.

    The layers are divided evenly if possible. Otherwise, if `layers + 2` layers can be divided
    evenly among all chunks, the embedding and the output count as a layer each, so the first and
    the last stage have one layer less (the placement of the published 405B runs). Otherwise, as
    many stages in the middle as necessary have one layer more than the others. Raises ValueError if
    there are fewer layers than chunks.

    >>> stage_layers(96, 8)
    (12, 12, 12, 12, 12, 12, 12, 12)
    >>> stage_layers(126, 8, 4)
    (15, 16, 16, 16, 16, 16, 16, 15)
    >>> stage_layers(7, 3)
    (2, 3, 2)
    """
    parts = stages * chunks
    if layers < parts and layers + 2 != parts:
        raise ValueError(
            f"{layers} layers cannot fill pp x vpp = {stages} x {chunks} = {parts} groups; "
            f"pp = {max(layers // chunks, 1)}, vpp = {chunks if layers >= chunks else 1} can"
        )
    if layers % parts == 0 or stages == 1:
        return (layers // stages,) * stages
    if (layers + 2) % parts == 0:
        whole = (layers + 2) // stages
        return (whole - 1, *(whole,) * (stages - 2), whole - 1)
    base, rest = divmod(layers, stages)
    first = (stages - rest) // 2
    return tuple(base + (first <= stage < first + rest) for stage in range(stages))


@lru_cache(maxsize=4096)
def stage_kinds(model: Transformer, stages: tuple[int, ...]) -> tuple[tuple[StageKind, int], ...]:
    """Returns each kind of stage of these numbers of layers, with the number of such stages.

    >>> sizes = {"hidden": 8, "heads": 2, "vocab": 9, "experts": 4, "top_k": 1, "expert_ffn": 8}
    >>> model = Transformer(layers=12, dense_layers=1, **sizes)
    >>> [(kind.layers, kind.dense, count) for kind, count in stage_kinds(model, (4, 4, 4))]
    [(4, 1, 1), (4, 0, 1), (4, 0, 1)]
    """
    kinds, before = [], 0
    for stage, layers in enumerate(stages):
        dense = model.dense_among(before + layers) - model.dense_among(before)
        kinds.append(StageKind(layers, dense, stage == len(stages) - 1))
        before += layers
    return tuple(Counter(kinds).items())
